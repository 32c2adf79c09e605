//! From expressions to nodes: repetitions are written out, small rules are put in the place of
//! their calls, and what could not be matched is refused.

#![forbid(unsafe_code)]

use super::charset::{CharSet, Class};
use super::{Grammar, NODES_MAX, Node, RETURN, RULES_MAX, UNBOUNDED};
use crate::bail;
use crate::error::Result;
use std::collections::HashMap;

/// What a rule matches.
#[derive(Clone, Debug)]
pub(super) enum Expr {
    /// One character of a class, by its number.
    Class(u32),
    /// What the rule of this number matches.
    Rule(u32),
    /// One after the other.
    Seq(Vec<Expr>),
    /// Any one of them.
    Alt(Vec<Expr>),
    /// From the first count on up to the second, which may be [`UNBOUNDED`].
    Repeat(Box<Expr>, u32, u32),
}

impl Expr {
    /// Matches the empty text.
    pub(super) fn empty() -> Expr {
        Expr::Seq(Vec::new())
    }

    fn is_empty(&self) -> bool {
        matches!(self, Expr::Seq(items) if items.is_empty())
    }

    /// A sequence. Empty parts are dropped, so that every part costs at least one node.
    pub(super) fn seq(items: impl IntoIterator<Item = Expr>) -> Expr {
        Expr::Seq(items.into_iter().filter(|item| !item.is_empty()).collect())
    }

    /// Repeats what is not empty.
    pub(super) fn repeat(self, min: u32, max: u32) -> Expr {
        if self.is_empty() { self } else { Expr::Repeat(Box::new(self), min, max) }
    }

    /// The expression or nothing.
    pub(super) fn optional(self) -> Expr {
        self.repeat(0, 1)
    }

    /// Nodes it becomes, at most; `None` if it calls a rule.
    fn leaf_nodes(&self) -> Option<u64> {
        match self {
            Expr::Class(_) => Some(1),
            Expr::Rule(_) => None,
            Expr::Seq(items) => items.iter().map(Expr::leaf_nodes).sum(),
            Expr::Alt(items) => items.iter().map(|item| Some(item.leaf_nodes()? + 1)).sum(),
            Expr::Repeat(body, min, max) => {
                let copies = if *max == UNBOUNDED { *min } else { *max };
                Some((body.leaf_nodes()? + 1).saturating_mul(u64::from(copies) + 1))
            }
        }
    }
}

/// A rule of at most this many nodes that calls no other is written out where it is called: a run
/// of characters then stays in one rule, which is what makes masks of strings fast.
const INLINED_NODES_MAX: u64 = 32;

struct Rule {
    /// How errors call it.
    name: String,
    expr: Option<Expr>,
}

/// Collects the classes and rules of one grammar.
#[derive(Default)]
pub(super) struct Builder {
    classes: Vec<Class>,
    class_numbers: HashMap<CharSet, u32>,
    rules: Vec<Rule>,
}

impl Builder {
    /// One character of `set`.
    pub(super) fn class(&mut self, set: CharSet) -> Expr {
        let number = *self.class_numbers.entry(set).or_insert_with_key(|set| {
            self.classes.push(Class::new(set.clone()));
            self.classes.len() as u32 - 1
        });
        Expr::Class(number)
    }

    /// The marker of a token.
    pub(super) fn marker(&mut self, token: u32) -> Expr {
        self.class(CharSet::marker(token))
    }

    /// The characters of `text` in a row.
    pub(super) fn literal(&mut self, text: &str) -> Expr {
        Expr::Seq(text.chars().map(|char| self.class(char.into())).collect())
    }

    /// Any one of the alternatives; without any, nothing.
    pub(super) fn any_of(&mut self, mut alternatives: Vec<Expr>) -> Expr {
        match alternatives.len() {
            0 => self.class(CharSet::default()),
            1 => alternatives.remove(0),
            _ => Expr::Alt(alternatives),
        }
    }

    /// A rule that is defined later.
    pub(super) fn declare(&mut self, name: impl Into<String>) -> Result<u32> {
        if self.rules.len() == RULES_MAX {
            bail!("more than {RULES_MAX} rules");
        }
        self.rules.push(Rule { name: name.into(), expr: None });
        Ok(self.rules.len() as u32 - 1)
    }

    /// Says what a declared rule matches, and how errors call it if that was not known yet.
    pub(super) fn define(&mut self, rule: u32, name: Option<String>, expr: Expr) {
        let rule = &mut self.rules[rule as usize];
        rule.name = name.unwrap_or(std::mem::take(&mut rule.name));
        rule.expr = Some(expr);
    }

    pub(super) fn is_defined(&self, rule: u32) -> bool {
        self.rules[rule as usize].expr.is_some()
    }

    /// A rule, as an expression that calls it.
    pub(super) fn rule(&mut self, name: &str, expr: Expr) -> Result<Expr> {
        let rule = self.declare(name)?;
        self.define(rule, None, expr);
        Ok(Expr::Rule(rule))
    }

    /// The grammar that starts at `root`; every rule must be defined.
    pub(super) fn build(self, root: u32) -> Result<Grammar> {
        let expr = |rule: Rule| (rule.name, rule.expr.expect("front ends define every rule"));
        let (names, bodies): (Vec<String>, Vec<Expr>) = self.rules.into_iter().map(expr).unzip();
        let is_inlined = |body: &Expr| {
            !body.is_empty() && body.leaf_nodes().is_some_and(|nodes| nodes <= INLINED_NODES_MAX)
        };
        let inlined = bodies.iter().map(is_inlined).collect();
        let mut emitter = Emitter { nodes: vec![Node::Return], bodies: &bodies, inlined };
        let mut starts = Vec::new();
        for (name, body) in names.iter().zip(&bodies) {
            let Some(start) = emitter.emit(body, RETURN) else {
                bail!("{name}: the grammar expands to more than {NODES_MAX} nodes");
            };
            starts.push(start);
        }
        let nodes = emitter.nodes;
        let is_read = |class: u32| !self.classes[class as usize].set.is_empty();
        let can_end = ends(&nodes, &starts, is_read);
        let can_be_empty = ends(&nodes, &starts, |_| false);
        if let Some(rule) = left_recursive(&nodes, &starts, &can_be_empty) {
            bail!("{}: left recursion: the rule begins with itself", names[rule]);
        }
        let root_start = starts[root as usize];
        if !can_end[root_start as usize] {
            bail!("{}: no text matches it", names[root as usize]);
        }
        let runs = runs(&nodes, &can_end);
        Ok(Grammar { nodes, classes: self.classes, starts, root: root_start, can_end, runs })
    }
}

/// Makes nodes back to front: what follows an expression exists before it.
struct Emitter<'a> {
    nodes: Vec<Node>,
    bodies: &'a [Expr],
    inlined: Vec<bool>,
}

impl Emitter<'_> {
    fn push(&mut self, node: Node) -> Option<u32> {
        (self.nodes.len() < NODES_MAX).then(|| {
            self.nodes.push(node);
            self.nodes.len() as u32 - 1
        })
    }

    /// The first node of `expr`, which goes on at `next`; `None` beyond the limit.
    fn emit(&mut self, expr: &Expr, next: u32) -> Option<u32> {
        match expr {
            Expr::Class(class) => self.push(Node::Char { class: *class, next }),
            Expr::Rule(rule) if self.inlined[*rule as usize] => {
                let bodies = self.bodies;
                self.emit(&bodies[*rule as usize], next)
            }
            Expr::Rule(rule) => self.push(Node::Call { rule: *rule, next }),
            Expr::Seq(items) => {
                items.iter().rev().try_fold(next, |next, item| self.emit(item, next))
            }
            Expr::Alt(items) => {
                let (last, others) = items.split_last().expect("an alternative");
                let last = self.emit(last, next)?;
                others.iter().rev().try_fold(last, |rest, item| {
                    let first = self.emit(item, next)?;
                    self.push(Node::Split(first, rest))
                })
            }
            Expr::Repeat(body, min, UNBOUNDED) => {
                let again = self.push(Node::Return)?;
                let first = self.emit(body, again)?;
                self.nodes[again as usize] = Node::Split(first, next);
                // The loop itself is the last of the copies that there must be.
                let start = if *min == 0 { again } else { first };
                (1..*min).try_fold(start, |next, _| self.emit(body, next))
            }
            Expr::Repeat(body, min, max) => {
                let start = (*min..*max).try_fold(next, |rest, _| {
                    let first = self.emit(body, rest)?;
                    self.push(Node::Split(first, next))
                })?;
                (0..*min).try_fold(start, |next, _| self.emit(body, next))
            }
        }
    }
}

/// For each node, whether the end of its rule can be reached if the classes that `passes` names
/// can be read.
fn ends(nodes: &[Node], starts: &[u32], passes: impl Fn(u32) -> bool) -> Vec<bool> {
    let mut dependents = vec![Vec::new(); nodes.len()];
    for (at, node) in nodes.iter().enumerate() {
        let needs = match *node {
            Node::Return => vec![],
            Node::Char { next, .. } => vec![next],
            Node::Split(a, b) => vec![a, b],
            Node::Call { rule, next } => vec![starts[rule as usize], next],
        };
        needs.iter().for_each(|needed| dependents[*needed as usize].push(at as u32));
    }
    let mut ends = vec![false; nodes.len()];
    let mut pending = vec![RETURN];
    while let Some(at) = pending.pop() {
        let now = match nodes[at as usize] {
            Node::Return => true,
            Node::Char { class, next } => passes(class) && ends[next as usize],
            Node::Split(a, b) => ends[a as usize] || ends[b as usize],
            Node::Call { rule, next } => {
                ends[starts[rule as usize] as usize] && ends[next as usize]
            }
        };
        if now && !ends[at as usize] {
            ends[at as usize] = true;
            pending.extend(&dependents[at as usize]);
        }
    }
    ends
}

/// A rule that calls itself before it has read anything.
fn left_recursive(nodes: &[Node], starts: &[u32], can_be_empty: &[bool]) -> Option<usize> {
    // The rules that each rule calls first; an index of the next one to look at for each rule.
    let mut first_calls = vec![Vec::new(); starts.len()];
    let mut seen = vec![usize::MAX; nodes.len()];
    for (rule, calls) in first_calls.iter_mut().enumerate() {
        let mut pending = vec![starts[rule]];
        while let Some(at) = pending.pop() {
            if std::mem::replace(&mut seen[at as usize], rule) == rule {
                continue;
            }
            match nodes[at as usize] {
                Node::Return | Node::Char { .. } => {}
                Node::Split(a, b) => pending.extend([a, b]),
                Node::Call { rule, next } => {
                    calls.push(rule as usize);
                    if can_be_empty[starts[rule as usize] as usize] {
                        pending.push(next);
                    }
                }
            }
        }
    }
    // Depth first; a rule met again while it is still on the path is recursive.
    let (mut is_done, mut is_open) = (vec![false; starts.len()], vec![false; starts.len()]);
    let mut path: Vec<usize> = Vec::new();
    for root in 0..starts.len() {
        path.extend((!is_done[root]).then_some(root));
        while let Some(&rule) = path.last() {
            is_open[rule] = true;
            match first_calls[rule].pop() {
                Some(call) if is_open[call] => return Some(call),
                Some(call) if is_done[call] => {}
                Some(call) => path.push(call),
                None => {
                    is_open[rule] = false;
                    is_done[rule] = true;
                    path.pop();
                }
            }
        }
    }
    None
}

/// [`Grammar::runs`].
fn runs(nodes: &[Node], can_end: &[bool]) -> Vec<u32> {
    let mut runs = vec![1u32; nodes.len()];
    for (at, node) in nodes.iter().enumerate() {
        let Node::Char { class, next } = *node else { continue };
        runs[at] = match same_class_next(nodes, can_end, class, next) {
            Some(following) if following == at => UNBOUNDED,
            // Only what loops back has a higher number, and its run is not known yet.
            Some(following) if following < at => runs[following].saturating_add(1),
            _ => 1,
        };
    }
    runs
}

/// A node that reads a character of `class` and may be the next one to read any.
fn same_class_next(nodes: &[Node], can_end: &[bool], class: u32, next: u32) -> Option<usize> {
    /// Enough for a loop over a few alternatives; a run that is missed only costs time.
    const VISITED_MAX: usize = 16;
    let mut pending = vec![next];
    for _ in 0..VISITED_MAX {
        let at = pending.pop()? as usize;
        match nodes[at] {
            Node::Char { class: other, .. } if other == class && can_end[at] => return Some(at),
            Node::Split(a, b) => pending.extend([b, a]),
            _ => {}
        }
    }
    None
}
