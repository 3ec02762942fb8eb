# What scripts with guests of QEMU have in common: images to boot, Debian's kernels for them, and what TLS wants in a guest. To be sourced; all
# lies in the directory `dir`, where the script has to be: `image` there is the root of the guest's file system.

# Ends the script unless there are these programs.
need() {
    local program
    for program in "$@"; do
        command -v "$program" >/dev/null || { echo "${0##*/}: there is no $program" >&2; exit 1; }
    done
}
need busybox cpio gzip xz depmod modprobe dpkg apt-get

# Runs what must not succeed; what it says goes where the output goes.
refuses() {
    if "$@"; then
        echo "${0##*/}: this has succeeded, and must not: $*" >&2
        return 1
    fi
}

# Copies the program $1 to the directory $2 of the image, or of another root, with the libraries that it is linked with.
with_libraries() {
    local from library root=${3:-image}
    from=$(command -v "$1")
    install -D "$from" "$root/$2/${from##*/}"
    for library in $(ldd "$from" 2>/dev/null | grep -o '/[^ ]*'); do
        [[ -e $root$library ]] || install -D "$(realpath "$library")" "$root$library"
    done
}

# Runs a command of apt on the packages of Debian's release $1, or on those of this machine where that is `here`.
apt_of() {
    local release=$1 from=$dir/apt/$1
    shift
    [[ $release != here ]] || { "$@"; return; }
    if [[ ! -e $from/apt.conf ]]; then
        mkdir -p "$from"/{lists,archives}/partial
        echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian $release main" >"$from/sources.list"
        cat >"$from/apt.conf" <<APT
Dir::State::lists "$from/lists";
Dir::State::status "/dev/null";
Dir::Cache "$from";
Dir::Etc::sourcelist "$from/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
APT::Sandbox::User "root";
APT
        APT_CONFIG=$from/apt.conf apt-get update -qq || {
            echo "${0##*/}: cannot read what packages Debian's $release has" >&2
            rm -r "$from"
            exit 1
        }
    fi
    APT_CONFIG=$from/apt.conf "$@"
}

# Fetches packages of a release, $3 and on, and unpacks them in the directory $2.
fetch() {
    local release=$1 to=$2 package
    shift 2
    mkdir -p "$dir/packages" "$to"
    (cd "$dir/packages" && apt_of "$release" apt-get download -qq "$@" 2>/dev/null) || { echo "${0##*/}: cannot fetch $*" >&2; exit 1; }
    for package in "$dir"/packages/*.deb; do dpkg -x "$package" "$to"; done
    rm -r "$dir/packages"
}

# Fetches the kernel that the package $2 of a release stands for, to a directory of the name $3, and puts the modules from $4 on into the image,
# with those that they need and in the order of `modules/order`; it is `vmlinuz` there, beside `image.gz`. A module with `?` is one that not all
# kernels have.
fetch_kernel() {
    local release=$1 stands_for=$2 to=$3 parts version module how path name
    shift 3
    # A package of its own each for the kernel and its modules, since 7.0.
    parts=$(apt_of "$release" apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances \
        "$stands_for" | grep -oE '^linux-(image|binary|modules|base)-[0-9]+\.[0-9]+\.[0-9].*' | sort -u)
    # shellcheck disable=SC2086 # There are several.
    fetch "$release" "$to" $parts
    # Some have them where Debian's directories were merged.
    [[ -e $to/lib ]] || ln -s usr/lib "$to/lib"
    version=$(ls "$to/lib/modules")
    depmod -b "$to" "$version"
    rm -rf image/modules
    mkdir -p image/modules
    : >image/modules/order
    for module in "$@"; do
        name=${module%\?}
        modprobe -d "$to" -S "$version" --show-depends "$name" >needed 2>/dev/null || [[ $module == *\? ]] ||
            { echo "${0##*/}: Linux $version has no module $name" >&2; exit 1; }
        while read -r how path _; do
            [[ $how == insmod ]] || continue
            name=$(basename "$path" .xz)
            [[ -e image/modules/$name ]] && continue
            if [[ $path == *.xz ]]; then xz -dc "$path"; else cat "$path"; fi >"image/modules/$name"
            echo "$name" >>image/modules/order
        done <needed
    done
    ln -s "$(realpath "$(find "$to" -name 'vmlinuz*' -type f | head -1)")" "$to/vmlinuz"
    (cd image && find . | cpio -o -H newc 2>/dev/null | gzip -1) >"$to/image.gz"
}

# Fetches tlshd, which a kernel asks to shake hands, of a release, with the libraries that it was built for; `start_tlshd` of the image starts it.
fetch_tlshd() {
    local release=$1 packages
    packages=$(apt_of "$release" apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances \
        ktls-utils | grep '^[a-z]' | sort -u)
    # shellcheck disable=SC2086
    fetch "$release" image/tlshd $packages
    rm -rf image/tlshd/usr/share
    cat >image/bin/start_tlshd <<'START'
#!/bin/sh
t=/tlshd/usr/lib/x86_64-linux-gnu
$t/ld-linux-x86-64.so.2 --library-path $t /tlshd/usr/sbin/tlshd -s -c /tlshd/etc/tlshd/config >/tmp/tlshd 2>&1 &
for i in $(seq 100); do
    grep -q Built /tmp/tlshd && exit
    sleep 0.1
done
cat /tmp/tlshd
exit 1
START
    chmod +x image/bin/start_tlshd
}

hex() { od -An -v -tx1 | tr -d ' \n'; }

# HKDF-Extract and HKDF-Expand-Label (RFC 8446, 7.1): digest, key, label, context, bytes. By another program than the one that is tested.
derive() {
    local label="tls13 $3"
    openssl kdf -keylen "$5" -kdfopt mode:EXTRACT_AND_EXPAND -kdfopt "digest:$1" -kdfopt "hexkey:$2" -kdfopt "hexinfo:$(
        printf '%04x%02x' "$5" ${#label}
        printf %s "$label" | hex
        printf %02x ${#4}
        printf %s "$4" | hex
    )" -binary HKDF | hex
}

# What a kernel is given of a key as it is handed on, for the host $2 and the subsystem $3 (TCP transport specification, 3.6.1.3): in hex.
tls_psk() {
    local hash key digest
    IFS=: read -r _ hash key _ <<<"$1"
    key=$(base64 -d <<<"$key" | hex)
    key=${key::-8}
    [[ $hash == 01 ]] && digest=SHA256 || digest=SHA384
    key=$(derive $digest "$key" HostNQN "$2" $((${#key} / 2)))
    derive $digest "$key" nvme-tls-psk "NVMe0R$hash $2 $3" $((${#key} / 2))
}
