//! The cluster file: any text is read, or refused with reasons. What is read, and written again,
//! says the same.
#![no_main]

use levada_spec::ClusterFile;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    match ClusterFile::parse("levada.toml", text) {
        Ok((cluster, warnings)) => {
            let _ = warnings.to_string();
            let again = ClusterFile::parse("again", &cluster.to_toml());
            let (again, _) = again.unwrap_or_else(|report| panic!("{report}"));
            assert_eq!(again, cluster);
        }
        Err(report) => assert!(!report.to_string().is_empty()),
    }
});
