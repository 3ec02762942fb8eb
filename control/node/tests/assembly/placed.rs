//! Where members have come to sit, and what those are told who only look.

use crate::shelf::{
    Shelf, cluster_file, fail, heads, operator_of, served_as, start, status, write_file,
};
use crate::spares::rebuild;
use levada_base::reactor::Reactor;
use levada_node::assembly::Tuning;
use levada_node::control::{ControlReply, ControlRequest};
use levada_node::outlook::{Outlook, outlook};
use levada_spec::{ClusterFile, HostSpec};
use std::rc::Rc;

/// The box, of whose data array the only spare is in an enclosure that has two members already.
fn crowded() -> ClusterFile {
    let mut file = cluster_file();
    file.drives[11].enclosure = file.drives[0].enclosure.clone();
    let data = file.arrays.iter_mut().find(|array| array.name == "data").expect("it has one");
    data.drives.retain(|drive| drive != "d10");
    data.spares = 1;
    file
}

async fn look(shelf: &Shelf, file: &ClusterFile) -> Result<Outlook, String> {
    let looked = outlook(shelf, file, Tuning::default().segment_stripes).await;
    looked.map_err(|error| error.to_string())
}

#[test]
fn an_array_says_when_its_members_have_come_to_sit_together() {
    Reactor::simulated(81).block_on(async {
        let shelf = Rc::new(Shelf::default());
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("levada.toml");
        std::fs::write(&path, crowded().to_toml()).expect("written");
        assert_eq!(look(&shelf, &crowded()).await, Ok(Outlook::New { missing: vec![] }));
        served_as(crowded(), &shelf, write_file).await;
        let as_dealt = Outlook::Exists { missing: vec![], reduced: vec![], displaced: vec![] };
        assert_eq!(look(&shelf, &crowded()).await, Ok(as_dealt));
        let (cluster, operator) = operator_of(crowded(), &shelf, path.clone()).await;
        assert_eq!(status(&operator).await.problems, Vec::<String>::new());
        fail(&operator, "d02", false).await.expect("bears it");
        rebuild(&cluster).await;
        let problems = status(&operator).await.problems.join("\n");
        let said = "array data survives the loss of no enclosure, and would of any 1 enclosure";
        assert!(problems.contains(said), "{problems}");
        assert!(problems.contains("needs e0 (d00, d01, d11)"), "{problems}");
        cluster.stop().await;
        let before = heads(&shelf).await;
        let Ok(Outlook::Exists { missing, displaced, .. }) = look(&shelf, &crowded()).await else {
            panic!("it exists");
        };
        assert_eq!((missing.len(), displaced.len(), displaced[0].borne), (0, 1, 0));
        assert!(problems.contains(&displaced[0].to_string()), "{}", displaced[0]);
        assert!(before == heads(&shelf).await, "not a byte was written");

        // A drive elsewhere becomes a spare, and takes over from one of too many.
        let (cluster, operator) = operator_of(crowded(), &shelf, path.clone()).await;
        shelf.drives.borrow_mut().remove("d02");
        let replace = ControlRequest::DriveReplace { drive: "d02".into(), force: false };
        assert_eq!(operator.answer(replace).await, ControlReply::Done);
        rebuild(&cluster).await;
        fail(&operator, "d11", false).await.expect("bears it");
        rebuild(&cluster).await;
        let problems = status(&operator).await.problems.join("\n");
        assert!(!problems.contains("survives the loss"), "{problems}");
        cluster.stop().await;
    });
}

#[test]
fn whoever_only_looks_is_told_what_a_start_would_refuse() {
    Reactor::simulated(82).block_on(async {
        let shelf = Rc::new(Shelf::default());
        let mut of_two = cluster_file();
        of_two.hosts =
            ["a", "b"].map(|name| HostSpec { name: name.into(), addresses: vec![] }).into();
        let refused = look(&shelf, &of_two).await.expect_err("of two hosts");
        let error = start(of_two, &shelf).await.err().expect("of two hosts").to_string();
        assert_eq!(refused, error);
        served_as(cluster_file(), &shelf, write_file).await;
        shelf.pulled.replace(["d00", "d01"].map(String::from).into());
        let Ok(Outlook::Exists { missing, reduced, .. }) = look(&shelf, &cluster_file()).await
        else {
            panic!("it bears that");
        };
        let left: Vec<_> = reduced.iter().map(|it| (&*it.array, it.drives)).collect();
        assert_eq!((missing.len(), left), (2, vec![("meta", 1), ("data", 0)]));
        shelf.pulled.replace(["d00", "d02", "d04"].map(String::from).into());
        let Ok(Outlook::Refused { missing, why: refused }) = look(&shelf, &cluster_file()).await
        else {
            panic!("one too many");
        };
        assert_eq!(missing.len(), 3, "each with why");
        let error = start(cluster_file(), &shelf).await.err().expect("one too many").to_string();
        assert_eq!(refused, error);
        assert!(refused.contains("missing: d00, d02, d04"), "{refused}");
    });
}
