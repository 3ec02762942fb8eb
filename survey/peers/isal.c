/* ISA-L as a peer: encodes on command, so that both sides of a ratio take turns within one run.
 *
 * isal pq|rs DATA PARITY CHUNK_BYTES STRIPES
 *
 * Each line of the input is a number of stripes to encode, going round the STRIPES that there are; the answer is the
 * seconds that took, on the clock and of the processor. `pq` is pq_gen, for which chunks are aligned to 32 bytes; `rs` is ec_encode_data with a Cauchy
 * matrix, whose tables are made once. Both choose their instructions themselves.
 *
 * What always holds: chunks lie one behind the other in one allocation aligned to a page, stripe after stripe, as on the other side.
 */
#include <isa-l.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { CHUNKS_MAX = 32, PAGE_BYTES = 4096 };

static double now_s(clockid_t clock)
{
	struct timespec now;
	clock_gettime(clock, &now);
	return now.tv_sec + now.tv_nsec / 1e9;
}

static int usage(void)
{
	fprintf(stderr, "usage: isal pq|rs DATA PARITY CHUNK_BYTES STRIPES\n");
	return 2;
}

int main(int argc, char **argv)
{
	if (argc != 6)
		return usage();
	int is_pq = strcmp(argv[1], "pq") == 0;
	int data = atoi(argv[2]), parity = atoi(argv[3]), chunk_bytes = atoi(argv[4]);
	long stripes = atol(argv[5]);
	int chunks = data + parity;
	if (data < 1 || parity < 1 || chunks > CHUNKS_MAX || chunk_bytes < PAGE_BYTES || chunk_bytes % PAGE_BYTES != 0 ||
	    stripes < 1 || (is_pq && parity != 2))
		return usage();

	size_t stripe_bytes = (size_t)chunks * chunk_bytes;
	unsigned char *all = aligned_alloc(PAGE_BYTES, stripes * stripe_bytes);
	if (all == NULL)
		return 1;
	for (size_t at = 0; at < stripes * stripe_bytes; at++)
		all[at] = at ^ (at >> 8) ^ (at / chunk_bytes * 41);

	unsigned char matrix[CHUNKS_MAX * CHUNKS_MAX], tables[32 * CHUNKS_MAX * CHUNKS_MAX];
	gf_gen_cauchy1_matrix(matrix, chunks, data);
	ec_init_tables(data, parity, matrix + data * data, tables);

	char line[64];
	long stripe = 0;
	while (fgets(line, sizeof line, stdin) != NULL) {
		long count = atol(line);
		double started = now_s(CLOCK_MONOTONIC), used = now_s(CLOCK_PROCESS_CPUTIME_ID);
		for (long done = 0; done < count; done++) {
			unsigned char *chunk[CHUNKS_MAX];
			for (int i = 0; i < chunks; i++)
				chunk[i] = all + stripe * stripe_bytes + (size_t)i * chunk_bytes;
			if (!is_pq)
				ec_encode_data(chunk_bytes, data, parity, tables, chunk, chunk + data);
			else if (pq_gen(chunks, chunk_bytes, (void **)chunk) != 0)
				return 1;
			stripe = (stripe + 1) % stripes;
		}
		printf("%.9f %.9f\n", now_s(CLOCK_MONOTONIC) - started, now_s(CLOCK_PROCESS_CPUTIME_ID) - used);
		fflush(stdout);
	}
	return 0;
}
