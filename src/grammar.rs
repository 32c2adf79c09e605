//! Grammars that constrain what is sampled: GBNF text, JSON Schema, any JSON object, tool calls.
//!
//! A front end ([`gbnf`], [`schema`]) makes one expression a rule; [`compile`] turns them into
//! nodes, each of which reads one character, chooses, or calls a rule; [`matcher`] follows a text
//! through them byte by byte; [`mask`] asks it for the tokens that may come next. Every grammar
//! that compiles can be completed from every state it reaches, short of the depth limit of calls.
//! Refused by name: what a front end does not support, left recursion, rules without any text to
//! match, and all that would expand beyond the limits below. Errors of GBNF carry line and column,
//! errors of a schema its JSON pointer.
//!
//! Text is UTF-8. Tokens need not be: a state may stand inside a character. A grammar may name
//! markers, tokens of which no text consists; to all but the mask they are one character each.

#![forbid(unsafe_code)]

mod charset;
mod compile;
mod gbnf;
mod guided;
mod mask;
mod matcher;
mod pattern;
mod regex;
mod schema;
mod values;

use crate::error::Result;
use crate::json::Value;
use charset::Class;
pub use guided::Guided;
pub use mask::{Constraint, TokenSet, Vocabulary};
use schema::Form;
pub use schema::calls::{CallForm, Tool, read_argument};

/// Longest GBNF text and longest pattern of a schema.
const TEXT_BYTES_MAX: usize = 256 << 10;
/// Rules, those that a front end makes for itself included.
const RULES_MAX: usize = 1 << 17;
/// Nodes, after repetitions are written out: some 30 bytes each, here and in a matcher.
const NODES_MAX: usize = 1 << 19;
/// Largest count of a repetition.
const REPEAT_MAX: u32 = 1 << 17;
/// Groups inside groups.
const NESTING_MAX: usize = 64;

/// A compiled grammar: immutable, shared by all that follow a text through it.
#[derive(Debug)]
pub struct Grammar {
    nodes: Vec<Node>,
    classes: Vec<Class>,
    /// First node of each rule.
    starts: Vec<u32>,
    /// First node of the root rule.
    root: u32,
    /// Whether the end of the rule can be reached from a node at all, by any text.
    can_end: Vec<bool>,
    /// For a node that reads a character: how many of its class may follow each other from here,
    /// whatever else may; at least 1, and [`UNBOUNDED`] for a loop.
    runs: Vec<u32>,
}

/// No upper end of a repetition, or of a run.
const UNBOUNDED: u32 = u32::MAX;
/// The node [`Node::Return`].
const RETURN: u32 = 0;

/// A step of a rule. Numbers are positions in [`Grammar`]'s lists.
#[derive(Clone, Copy, Debug)]
enum Node {
    /// The rule ends.
    Return,
    /// Reads one character of the class.
    Char { class: u32, next: u32 },
    /// Goes on at either.
    Split(u32, u32),
    /// Goes through a rule, then on.
    Call { rule: u32, next: u32 },
}

impl Grammar {
    /// Compiles GBNF: `name ::= …` rules of literals, classes, `.`, groups, alternatives and the
    /// repetitions `? * + {m} {m,} {m,n}`; the text starts at the rule `root`. Escapes of literals
    /// and classes are `\n \r \t \" \\ \[ \] \- \^ \xHH \uHHHH \UHHHHHHHH`, the last three for code
    /// points. A rule ends where the next one begins, so lines may break anywhere but in literals
    /// and classes.
    ///
    /// # Errors
    /// Line and column of what is malformed, undefined, defined twice, left-recursive or too large.
    pub fn from_gbnf(text: &str) -> Result<Grammar> {
        gbnf::compile(text)
    }

    /// Compiles a JSON Schema; every text of the grammar is valid for it. The reverse does not
    /// hold: white space is bounded, members come in the order of `properties`, and undeclared ones
    /// only if `additionalProperties` asks for them. The head of `schema.rs` has all that is
    /// narrowed.
    ///
    /// # Errors
    /// JSON pointer and name of a keyword that is malformed or unsupported.
    pub fn from_schema(schema: &Value) -> Result<Grammar> {
        schema::compile(schema, Form::Json)
    }

    /// Compiles a JSON Schema of strings, written as they are, without quotes and escapes.
    ///
    /// # Errors
    /// As [`Grammar::from_schema`], and a schema that allows no string.
    pub fn from_text_schema(schema: &Value) -> Result<Grammar> {
        schema::compile(schema, Form::Text)
    }

    /// One call of one of the tools, or more if `repeats`; its arguments are valid for the tool's
    /// schema and come in the order of `properties`, undeclared ones never.
    ///
    /// # Errors
    /// As [`Grammar::from_schema`], with the name of the tool.
    pub fn from_calls(tools: &[Tool], form: &CallForm, repeats: bool) -> Result<Grammar> {
        schema::calls::compile(tools, form, repeats)
    }

    /// Any JSON object.
    pub fn json_object() -> Grammar {
        schema::json_object()
    }

    /// What either grammar matches.
    pub fn or(mut self, other: Grammar) -> Grammar {
        let (nodes, classes) = (self.nodes.len() as u32, self.classes.len() as u32);
        let rules = self.starts.len() as u32;
        let moved = |node: Node| match node {
            Node::Return => Node::Return,
            Node::Char { class, next } => Node::Char { class: class + classes, next: next + nodes },
            Node::Split(a, b) => Node::Split(a + nodes, b + nodes),
            Node::Call { rule, next } => Node::Call { rule: rule + rules, next: next + nodes },
        };
        self.nodes.extend(other.nodes.into_iter().map(moved));
        self.nodes.push(Node::Split(self.root, other.root + nodes));
        self.root = self.nodes.len() as u32 - 1;
        self.classes.extend(other.classes);
        self.starts.extend(other.starts.into_iter().map(|start| start + nodes));
        self.can_end.extend(other.can_end.into_iter().chain([true]));
        self.runs.extend(other.runs.into_iter().chain([1]));
        self
    }
}
