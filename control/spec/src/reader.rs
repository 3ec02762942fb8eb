//! Reading one table and one key: types, units, unknown keys, and where everything stands.
//!
//! Every method answers with a value or `None`, and has said why when it is `None` for any
//! reason but absence.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use toml_edit::{Item, TableLike, Value};

use crate::error::nearest;
use crate::{Bytes, Place, Problem, ProblemKind, SizeError, pattern};

/// Which value of the file a place belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Node {
    File,
    Cluster,
    Drives,
    Spares,
    Rebuild,
    Scrub,
    Health,
    Host(usize),
    Enclosure(usize),
    Drive(usize),
    Array(usize),
    FileSystem(usize),
    Mount(usize),
    Export(usize),
    Testing,
    Model(usize),
}

/// Where each value and each of its keys stands; empty for files made by a program.
#[derive(Default)]
pub(crate) struct Places {
    by_key: HashMap<(Node, &'static str), Place>,
    /// Values that hold a stand-in; what follows from them is not worth a word.
    pub(crate) doubtful: HashSet<Node>,
}

impl Places {
    /// The place of a key, else of the value it would belong to.
    pub(crate) fn of(&self, node: Node, key: &'static str) -> Option<Place> {
        self.by_key.get(&(node, key)).or_else(|| self.by_key.get(&(node, ""))).copied()
    }

    /// Whether any of `nodes` could not be read in full.
    pub(crate) fn in_doubt(&self, nodes: &[Node]) -> bool {
        nodes.iter().any(|node| self.doubtful.contains(node))
    }
}

/// One table under reading.
#[derive(Clone, Copy)]
pub(crate) struct Table<'t> {
    pub(crate) node: Node,
    /// As the file writes it: `[[array]]`.
    pub(crate) title: &'static str,
    pub(crate) keys: &'t dyn TableLike,
}

pub(crate) struct Reader<'a> {
    pub(crate) text: &'a str,
    pub(crate) problems: Vec<Problem>,
    pub(crate) places: Places,
}

pub(crate) fn type_name(item: &Item) -> &'static str {
    match item {
        Item::None => "nothing",
        Item::Table(_) | Item::Value(Value::InlineTable(_)) => "a table",
        Item::ArrayOfTables(_) => "a list of tables",
        Item::Value(Value::Array(_)) => "a list",
        Item::Value(Value::String(_)) => "a text",
        Item::Value(Value::Integer(_)) => "a whole number",
        Item::Value(Value::Float(_)) => "a number with a fraction",
        Item::Value(Value::Boolean(_)) => "true or false",
        Item::Value(Value::Datetime(_)) => "a date or time",
    }
}

/// The longest name of anything but a drive, in bytes.
pub(crate) const NAME_MOST: usize = 63;

/// Whether `name` may be a name of at most `most` bytes; see [`ProblemKind::BadName`].
pub(crate) fn is_name(name: &str, most: usize) -> bool {
    (1..=most).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

impl Reader<'_> {
    pub(crate) fn problem(&mut self, kind: ProblemKind, span: Option<Range<usize>>) {
        let place = span.map(|span| Place::of(self.text, span));
        self.problems.push(Problem { kind, place });
    }

    pub(crate) fn problem_at(&mut self, kind: ProblemKind, node: Node, key: &'static str) {
        let place = self.places.of(node, key);
        self.problems.push(Problem { kind, place });
    }

    /// Reads one value and marks it doubtful when that finds a problem.
    pub(crate) fn doubting<T>(&mut self, node: Node, read: impl FnOnce(&mut Self) -> T) -> T {
        let before = self.problems.len();
        let value = read(self);
        if self.problems.len() > before {
            self.places.doubtful.insert(node);
        }
        value
    }

    pub(crate) fn place(&mut self, node: Node, key: &'static str, span: Option<Range<usize>>) {
        if let Some(span) = span {
            self.places.by_key.insert((node, key), Place::of(self.text, span));
        }
    }

    /// Notes that a value's key stands where that of another value does, from which it comes.
    pub(crate) fn place_as(&mut self, node: Node, key: &'static str, from: Node) {
        if let Some(place) = self.places.by_key.get(&(from, key)).copied() {
            self.places.by_key.insert((node, key), place);
        }
    }

    /// Notes the places of a table and of its keys, and complains about keys it may not have.
    pub(crate) fn enter<'t>(
        &mut self,
        node: Node,
        title: &'static str,
        keys: &'t dyn TableLike,
        span: Option<Range<usize>>,
        allowed: &'static [&'static str],
    ) -> Table<'t> {
        self.place(node, "", span);
        for (key, item) in keys.iter() {
            match allowed.iter().find(|known| **known == key) {
                Some(known) => self.place(node, known, item.span()),
                None => {
                    self.places.doubtful.insert(node);
                    let span = keys.key(key).and_then(toml_edit::Key::span).or_else(|| item.span());
                    let nearest = nearest(key, allowed.iter().copied());
                    self.problem(
                        ProblemKind::UnknownKey { key: key.into(), table: title, nearest, allowed },
                        span,
                    );
                }
            }
        }
        Table { node, title, keys }
    }

    /// The single table `[key]`, if there.
    pub(crate) fn table<'t>(
        &mut self,
        parent: Table<'t>,
        key: &'static str,
        node: Node,
        title: &'static str,
        allowed: &'static [&'static str],
    ) -> Option<Table<'t>> {
        let item = parent.keys.get(key)?;
        match item.as_table_like() {
            Some(keys) => Some(self.enter(node, title, keys, item.span(), allowed)),
            None => {
                self.places.doubtful.insert(Node::File);
                self.wrong_type(
                    key,
                    item,
                    "a single table, written with one pair of brackets",
                    item.span(),
                );
                None
            }
        }
    }

    /// All tables `[[key]]`, in order.
    pub(crate) fn tables<'t>(
        &mut self,
        parent: Table<'t>,
        key: &'static str,
        node: fn(usize) -> Node,
        title: &'static str,
        allowed: &'static [&'static str],
    ) -> Vec<Table<'t>> {
        let expected = "a list of tables, each written with double brackets";
        let mut dropped = false;
        let mut tables = Vec::new();
        match parent.keys.get(key) {
            None => {}
            Some(Item::ArrayOfTables(list)) => {
                for keys in list {
                    tables.push(self.enter(node(tables.len()), title, keys, keys.span(), allowed));
                }
            }
            Some(Item::Value(Value::Array(list))) => {
                for value in list {
                    match value.as_inline_table() {
                        Some(keys) => {
                            let node = node(tables.len());
                            tables.push(self.enter(node, title, keys, keys.span(), allowed));
                        }
                        None => {
                            dropped = true;
                            let item = Item::Value(value.clone());
                            self.wrong_type(key, &item, expected, value.span());
                        }
                    }
                }
            }
            Some(other) => {
                dropped = true;
                self.wrong_type(key, other, expected, other.span());
            }
        }
        // Names that a dropped table would have brought are not known to be wrong.
        if dropped {
            self.places.doubtful.insert(parent.node);
        }
        tables
    }

    pub(crate) fn wrong_type(
        &mut self,
        key: &str,
        found: &Item,
        expected: &'static str,
        span: Option<Range<usize>>,
    ) {
        self.problem(
            ProblemKind::WrongType { key: key.into(), found: type_name(found), expected },
            span,
        );
    }

    pub(crate) fn bad_choice(
        &mut self,
        table: Table<'_>,
        key: &'static str,
        value: String,
        allowed: Vec<String>,
    ) {
        let near = nearest(&value, allowed.iter().map(String::as_str)).map(String::from);
        self.problem_at(
            ProblemKind::BadChoice { key, value, nearest: near, allowed },
            table.node,
            key,
        );
    }

    pub(crate) fn text_of(&mut self, table: Table<'_>, key: &'static str) -> Option<String> {
        let item = table.keys.get(key)?;
        match item.as_str() {
            // A NUL ends a path for the kernel, and means nothing in a name.
            Some(text) if !text.is_empty() && !text.contains('\0') => Some(text.into()),
            Some(_) => {
                let kind =
                    ProblemKind::WrongType { key: key.into(), found: "empty", expected: "a text" };
                self.problem(kind, item.span());
                None
            }
            None => {
                self.wrong_type(key, item, "a text in quotes", item.span());
                None
            }
        }
    }

    /// `true` or `false`.
    pub(crate) fn truth(&mut self, table: Table<'_>, key: &'static str) -> Option<bool> {
        let item = table.keys.get(key)?;
        let truth = item.as_bool();
        if truth.is_none() {
            self.wrong_type(key, item, "true or false", item.span());
        }
        truth
    }

    pub(crate) fn needed_text(
        &mut self,
        table: Table<'_>,
        key: &'static str,
        example: &'static str,
    ) -> Option<String> {
        self.needs(table, key, example);
        self.text_of(table, key)
    }

    pub(crate) fn needs(&mut self, table: Table<'_>, key: &'static str, example: &'static str) {
        if !table.keys.contains_key(key) {
            self.problem_at(
                ProblemKind::MissingKey { key, table: table.title, example },
                table.node,
                "",
            );
        }
    }

    pub(crate) fn name(&mut self, table: Table<'_>) -> Option<String> {
        let name = self.needed_text(table, "name", "name = \"a\"")?;
        if !is_name(&name, NAME_MOST) {
            self.problem_at(
                ProblemKind::BadName { name: name.clone(), most: NAME_MOST },
                table.node,
                "name",
            );
        }
        Some(name)
    }

    pub(crate) fn size(&mut self, table: Table<'_>, key: &'static str) -> Option<Bytes> {
        let item = table.keys.get(key)?;
        match item {
            Item::Value(Value::String(text)) => match text.value().parse() {
                Ok(bytes) => Some(bytes),
                Err(reason) => {
                    let text = text.value().clone();
                    self.problem(ProblemKind::BadSize { key, text, reason }, item.span());
                    None
                }
            },
            Item::Value(Value::Integer(number)) if *number.value() >= 0 => {
                Some(Bytes(*number.value() as u64))
            }
            Item::Value(Value::Integer(number)) => {
                let (text, reason) = (number.value().to_string(), SizeError::Negative);
                self.problem(ProblemKind::BadSize { key, text, reason }, item.span());
                None
            }
            other => {
                self.wrong_type(key, other, "a size such as \"2GiB\"", other.span());
                None
            }
        }
    }

    /// A drive's `size`; one that cannot be read is still one that was given.
    pub(crate) fn size_or_stand_in(&mut self, table: Table<'_>) -> Option<Bytes> {
        let given = table.keys.contains_key("size");
        self.size(table, "size").or_else(|| given.then_some(Bytes::gib(1)))
    }

    pub(crate) fn needed_size(
        &mut self,
        table: Table<'_>,
        key: &'static str,
        example: &'static str,
    ) -> Bytes {
        self.needs(table, key, example);
        match self.size(table, key) {
            Some(Bytes(0)) => {
                let (least, most) = (Bytes(1), Bytes(u64::MAX));
                self.problem_at(
                    ProblemKind::SizeOutOfRange { key, value: Bytes(0), least, most },
                    table.node,
                    key,
                );
                Bytes(1)
            }
            Some(size) => size,
            None => Bytes(1),
        }
    }

    pub(crate) fn number(
        &mut self,
        table: Table<'_>,
        key: &'static str,
        least: u64,
        most: u64,
    ) -> Option<u64> {
        let item = table.keys.get(key)?;
        match item.as_integer() {
            Some(value) => match u64::try_from(value) {
                Ok(number) if (least..=most).contains(&number) => Some(number),
                _ => {
                    self.problem(ProblemKind::OutOfRange { key, value, least, most }, item.span());
                    None
                }
            },
            None => {
                self.wrong_type(key, item, "a whole number", item.span());
                None
            }
        }
    }

    pub(crate) fn needed_number(
        &mut self,
        table: Table<'_>,
        key: &'static str,
        least: u64,
        most: u64,
        example: &'static str,
    ) -> u64 {
        self.needs(table, key, example);
        self.number(table, key, least, most).unwrap_or(least)
    }

    pub(crate) fn list(
        &mut self,
        table: Table<'_>,
        key: &'static str,
    ) -> Vec<(Value, Option<Range<usize>>)> {
        match table.keys.get(key) {
            None => Vec::new(),
            Some(Item::Value(Value::Array(list))) => {
                list.iter().map(|value| (value.clone(), value.span())).collect()
            }
            Some(other) => {
                self.wrong_type(key, other, "a list in square brackets", other.span());
                Vec::new()
            }
        }
    }

    pub(crate) fn expand(
        &mut self,
        pattern: &str,
        span: Option<Range<usize>>,
    ) -> Option<Vec<String>> {
        if pattern.is_empty() || pattern.contains('\0') {
            let kind = ProblemKind::WrongType {
                key: "drives".into(),
                found: "empty",
                expected: "a path or name",
            };
            self.problem(kind, span);
            return None;
        }
        match pattern::expand(pattern) {
            Ok(texts) => Some(texts),
            Err(reason) => {
                self.problem(ProblemKind::BadPattern { text: pattern.into(), reason }, span);
                None
            }
        }
    }
}
