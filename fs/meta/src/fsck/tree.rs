//! Every directory leads to the root.
//!
//! A chain of parents that ends at what is no directory is found by what is missing there; so what is
//! left to look for is chains that never end. Memory: 17 bytes for each directory, and what does not fit is
//! told as not checked.

use levada_base::ids::Ino;

/// The directories and their parents, in the order of inodes.
#[derive(Default)]
pub struct Tree {
    inos: Vec<u64>,
    parents: Vec<u64>,
    directories_max: usize,
    left_out: u64,
}

/// Bytes of a directory: its number, its parent, and what is known while chains are followed.
const DIRECTORY_BYTES: usize = 17;

impl Tree {
    /// For as many directories as fit so many bytes.
    pub fn new(bytes_max: u64) -> Self {
        let directories_max = (bytes_max / DIRECTORY_BYTES as u64) as usize;
        Self { directories_max, ..Self::default() }
    }

    pub fn bytes(&self) -> usize {
        self.inos.len() * DIRECTORY_BYTES
    }

    /// Directories that found no room.
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    /// A directory is in `parent`, or not in the tree any more.
    pub fn set(&mut self, ino: Ino, parent: Option<Ino>) {
        let at = match self.inos.last() {
            Some(last) if *last < ino.0 => Err(self.inos.len()),
            _ => self.inos.binary_search(&ino.0),
        };
        match (at, parent) {
            (Ok(at), Some(parent)) => self.parents[at] = parent.0,
            // Its place stays: a directory that leads to itself would be a fault, one to the root is none.
            (Ok(at), None) => self.parents[at] = Ino::ROOT.0,
            (Err(_), None) => {}
            (Err(_), Some(_)) if self.inos.len() >= self.directories_max => self.left_out += 1,
            (Err(at), Some(parent)) => {
                self.inos.insert(at, ino.0);
                self.parents.insert(at, parent.0);
            }
        }
    }

    /// A directory of each chain that never ends, the lowest one.
    pub fn cycles(&self) -> Vec<Ino> {
        const UNKNOWN: u8 = 0;
        const ON_PATH: u8 = 1;
        const SOUND: u8 = 2;
        let mut states = vec![UNKNOWN; self.inos.len()];
        let mut cycles = Vec::new();
        for start in 0..self.inos.len() {
            let mut path = Vec::new();
            let mut at = Some(start);
            while let Some(here) = at.filter(|here| states[*here] == UNKNOWN) {
                states[here] = ON_PATH;
                path.push(here);
                let is_root = self.inos[here] == Ino::ROOT.0;
                at = if is_root { None } else { self.inos.binary_search(&self.parents[here]).ok() };
            }
            if let Some(again) = at.filter(|again| states[*again] == ON_PATH) {
                let from = path.iter().position(|here| *here == again).unwrap_or(0);
                let lowest = path[from..].iter().min().expect("it holds where it began");
                cycles.push(Ino(self.inos[*lowest]));
            }
            path.iter().for_each(|here| states[*here] = SOUND);
        }
        cycles
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(directories: &[(u64, u64)]) -> Tree {
        let mut tree = Tree::new(1 << 20);
        for (ino, parent) in directories {
            tree.set(Ino(*ino), Some(Ino(*parent)));
        }
        tree
    }

    #[test]
    fn only_chains_that_never_end_are_found() {
        assert_eq!(tree(&[(1, 1), (2, 1), (3, 2), (9, 77)]).cycles(), []);
        // 5 leads into 6 -> 7 -> 8 -> 6; 10 is in itself.
        let cut_off = [(1, 1), (5, 6), (6, 7), (7, 8), (8, 6), (10, 10), (11, 10)];
        assert_eq!(tree(&cut_off).cycles(), [Ino(6), Ino(10)]);
    }

    #[test]
    fn a_directory_may_move_and_go() {
        let mut tree = tree(&[(1, 1), (2, 3), (3, 2), (6, 6)]);
        tree.set(Ino(2), Some(Ino(1)));
        tree.set(Ino(6), None);
        tree.set(Ino(7), None);
        assert_eq!(tree.cycles(), []);
        tree.set(Ino(4), Some(Ino(5)));
        tree.set(Ino(5), Some(Ino(4)));
        assert_eq!(tree.cycles(), [Ino(4)]);
    }

    #[test]
    fn what_finds_no_room_is_counted() {
        let mut tree = Tree::new(3 * DIRECTORY_BYTES as u64);
        for ino in 1..=5 {
            tree.set(Ino(ino), Some(Ino(1)));
        }
        assert_eq!((tree.left_out(), tree.bytes()), (2, 51));
    }
}
