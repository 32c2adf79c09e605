//! Reads tokenizer.json and checks that it is what this crate implements.
//!
//! Owns the meaning of every field: one that would change ids or text and is not implemented is
//! refused by name and value; so is an unknown one. Only the post-processor is passed over, since
//! it adds tokens around a text, which [`Tokenizer::encode`] never does. Any input gives a
//! tokenizer or one error, in time and memory proportional to its length.

#![forbid(unsafe_code)]

use super::bpe::{Merge, Merges, Seeded, Vocabulary};
use super::scanner::SPLIT_PATTERN;
use super::{Matcher, Tokenizer};
use crate::bail;
use crate::error::{Context, Result};
use crate::json::{self, Kind, Limits, Reader, Value, object};
use crate::sys::read_file;
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

/// The largest file that is read; GLM-5.2's has 10 MB.
const FILE_BYTES_MAX: usize = 64 << 20;

/// The longest added token; GLM-5.2's longest has 26.
const ADDED_BYTES_MAX: usize = 1024;

/// Longest excerpt of a value in an error, in characters.
const EXCERPT_CHARS_MAX: usize = 120;

impl Tokenizer {
    /// Reads the file `path`, a tokenizer.json.
    ///
    /// # Errors
    /// The file cannot be read, is malformed, or asks for something that is not implemented.
    pub fn load(path: &Path) -> Result<Tokenizer> {
        let bytes = read_file(path, FILE_BYTES_MAX);
        bytes.and_then(|bytes| Tokenizer::from_bytes(&bytes)).context(|| path.display())
    }

    /// The tokenizer that the bytes of a tokenizer.json describe.
    ///
    /// # Errors
    /// As [`Tokenizer::load`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Tokenizer> {
        read_document(bytes)?.build()
    }
}

/// What a tokenizer.json holds, syntax and fixed fields checked. Strings of the vocabulary and the
/// merges are in the byte-level alphabet, as in the file.
#[derive(Default)]
struct Document<'a> {
    added: Vec<Added>,
    ignore_merges: bool,
    vocab: Vec<(Cow<'a, str>, u32)>,
    /// Two tokens each, with a space between.
    merges: Vec<Cow<'a, str>>,
}

/// One element of `added_tokens`.
#[derive(Default)]
struct Added {
    content: String,
    id: u32,
    special: bool,
    normalized: bool,
}

fn read_document(bytes: &[u8]) -> Result<Document<'_>> {
    let limits = Limits { max_bytes: FILE_BYTES_MAX, ..Limits::default() };
    let mut reader = Reader::new(bytes, limits)?;
    let mut document = Document::default();
    reader.fields(&["pre_tokenizer", "decoder", "model"], |reader, key| {
        match key {
            "version" => check(key, &reader.value()?, &["\"1.0\""])?,
            "truncation" | "padding" | "normalizer" => check(key, &reader.value()?, &["null"])?,
            "added_tokens" => reader.array(|reader| {
                let at = document.added.len();
                document.added.push(read_added(reader).context(|| format!("{key}[{at}]"))?);
                Ok(())
            })?,
            "pre_tokenizer" => check_pre_tokenizer(&reader.value()?)?,
            "post_processor" => reader.skip()?,
            "decoder" => check_object(key, &reader.value()?, &[("type", BYTE_LEVEL)], SWITCHES)?,
            "model" => read_model(reader, &mut document).context(|| key)?,
            _ => bail!("unknown field {key:?}"),
        }
        Ok(())
    })?;
    reader.finish()?;
    Ok(document)
}

/// Refuses a `value` that is none of those `wanted`, which are JSON.
fn check(name: &str, value: &Value, wanted: &[&str]) -> Result<()> {
    let found = json::to_compact(value);
    if wanted.contains(&found.as_str()) {
        return Ok(());
    }
    let wanted = wanted.join(" or ");
    match found.char_indices().nth(EXCERPT_CHARS_MAX) {
        None => bail!("{name} is not implemented: expected {wanted}, found {found}"),
        Some((cut, _)) => {
            bail!("{name} is not implemented: expected {wanted}, found {}…", &found[..cut])
        }
    }
}

/// Checks that the object `value` has exactly the `wanted` members and perhaps `also` some others
/// that have no influence.
fn check_object(name: &str, value: &Value, wanted: &[(&str, &str)], also: &[&str]) -> Result<()> {
    for (key, wanted) in wanted {
        check(&format!("{name}.{key}"), value.get(key).unwrap_or(&Value::Null), &[wanted])?;
    }
    let known = |key: &str| wanted.iter().any(|(wanted, _)| *wanted == key) || also.contains(&key);
    match value.as_object().unwrap_or_default().iter().find(|(key, _)| !known(key)) {
        Some((key, _)) => bail!("{name}: unknown field {key:?}"),
        None => Ok(()),
    }
}

/// The type of the steps that turn text to bytes and back, and their switches, which matter to a
/// pre-tokenizer only.
const BYTE_LEVEL: &str = "\"ByteLevel\"";
const SWITCHES: &[&str] = &["add_prefix_space", "trim_offsets", "use_regex"];

/// The pre-tokenizer is GLM's: the split rule, each match and each gap a piece; then bytes.
fn check_pre_tokenizer(value: &Value) -> Result<()> {
    check_object("pre_tokenizer", value, &[("type", "\"Sequence\"")], &["pretokenizers"])?;
    let steps = value.get("pretokenizers").and_then(Value::as_array);
    let Some([split, byte_level]) = steps else {
        bail!("pre_tokenizer.pretokenizers is not implemented: expected Split and ByteLevel");
    };
    let pattern = json::to_compact(&object(vec![("Regex", SPLIT_PATTERN.into())]));
    let wanted = [
        ("type", "\"Split\""),
        ("pattern", pattern.as_str()),
        ("behavior", "\"Isolated\""),
        ("invert", "false"),
    ];
    check_object("pre_tokenizer.pretokenizers[0]", split, &wanted, &[])?;
    let wanted = [("type", BYTE_LEVEL), ("add_prefix_space", "false"), ("use_regex", "false")];
    check_object("pre_tokenizer.pretokenizers[1]", byte_level, &wanted, SWITCHES)
}

fn read_added(reader: &mut Reader) -> Result<Added> {
    let mut added = Added::default();
    let keys = ["id", "content", "special", "normalized", "single_word", "lstrip", "rstrip"];
    reader.fields(&keys, |reader, key| {
        match key {
            "id" => added.id = read_id(reader)?,
            "content" => added.content = reader.string()?.into_owned(),
            "special" => added.special = reader.bool()?,
            "normalized" => added.normalized = reader.bool()?,
            "single_word" | "lstrip" | "rstrip" => check(key, &reader.value()?, &["false"])?,
            _ => bail!("unknown field {key:?}"),
        }
        Ok(())
    })?;
    match added.content.len() {
        1..=ADDED_BYTES_MAX => Ok(added),
        len => bail!("content has {len} bytes, expected 1 to {ADDED_BYTES_MAX}"),
    }
}

/// A token id: an integer below 2^32 - 1, which stands for none.
fn read_id(reader: &mut Reader) -> Result<u32> {
    let at = reader.offset();
    let id = reader.u64()?;
    match u32::try_from(id) {
        Ok(id) if id < u32::MAX => Ok(id),
        _ => Err(reader.error_at(at, &format!("the token id {id} is out of range"))),
    }
}

fn read_model<'a>(reader: &mut Reader<'a>, document: &mut Document<'a>) -> Result<()> {
    reader.fields(&["type", "vocab", "merges"], |reader, key| {
        match key {
            "type" => check(key, &reader.value()?, &["\"BPE\""])?,
            "dropout" | "unk_token" => check(key, &reader.value()?, &["null"])?,
            "continuing_subword_prefix" | "end_of_word_suffix" => {
                check(key, &reader.value()?, &["null", "\"\""])?;
            }
            "byte_fallback" => check(key, &reader.value()?, &["false"])?,
            // Says how unknown tokens are joined; there are none.
            "fuse_unk" => drop(reader.bool()?),
            "ignore_merges" => document.ignore_merges = reader.bool()?,
            "vocab" => reader.object(|reader, token| {
                document.vocab.push((token, read_id(reader)?));
                Ok(())
            })?,
            "merges" => document.merges = read_merges(reader).context(|| key)?,
            _ => bail!("unknown field {key:?}"),
        }
        Ok(())
    })
}

/// The list of merges, all spelled `"a b"` or all `["a", "b"]`.
fn read_merges<'a>(reader: &mut Reader<'a>) -> Result<Vec<Cow<'a, str>>> {
    let mut merges = Vec::new();
    let mut spelling = None;
    reader.array(|reader| {
        let (at, kind) = (reader.offset(), reader.peek()?);
        if *spelling.get_or_insert(kind) != kind {
            return Err(reader.error_at(at, "merges are spelled both as strings and as pairs"));
        }
        if kind == Kind::Array {
            let mut pair = Vec::new();
            reader.array(|reader| {
                pair.push(reader.string()?);
                Ok(())
            })?;
            if pair.len() != 2 {
                let message = format!("expected a pair of tokens, found {}", pair.len());
                return Err(reader.error_at(at, &message));
            }
            merges.push(pair.join(" ").into());
        } else {
            let line = reader.string()?;
            // A comment, also when it looks like a merge.
            merges.extend((!line.starts_with("#version")).then_some(line));
        }
        Ok(())
    })?;
    Ok(merges)
}

impl Document<'_> {
    /// Builds the tables, checking every reference.
    fn build(mut self) -> Result<Tokenizer> {
        let mut tokens = build_tokens(&self.vocab).context(|| "model.vocab")?;
        number_added(&self.added, &mut tokens)?;
        let added = self.added.iter().map(|added| (added.content.clone(), added.id)).collect();
        let is_special: HashMap<u32, bool> =
            self.added.iter().map(|added| (added.id, added.special)).collect();
        let seeded = Seeded::new();
        // Text must not lead to an added token, so they are left out.
        let mut vocabulary = Vocabulary::with_capacity_and_hasher(tokens.len(), seeded);
        for (id, token) in (0..).zip(&tokens).filter(|(id, _)| !is_special.contains_key(id)) {
            if let Some(first) = vocabulary.insert(token.clone(), id) {
                bail!("model.vocab: a token occurs twice, with the ids {first} and {id}");
            }
        }
        for Added { content, id, .. } in &self.added {
            if let Some(word) = vocabulary.get(&tokens[*id as usize]) {
                bail!("added_tokens: the id of {content:?} is {id}, in the vocabulary {word}");
            }
        }
        let mut byte_ids = [0; 256];
        for (byte, id) in (0..=u8::MAX).zip(&mut byte_ids) {
            // Without one, some text could not be written at all.
            let Some(&known) = vocabulary.get(&[byte][..]) else {
                bail!("model.vocab: no token for the single byte 0x{byte:02x}");
            };
            *id = known;
        }
        let merges = build_merges(&self.merges, &vocabulary, seeded)?;
        self.added.sort_by_key(|added| Reverse(added.content.len()));
        let matchers = [false, true].map(|normalized| {
            let members = self.added.iter().filter(|added| added.normalized == normalized);
            Matcher::new(members.map(|added| (added.content.clone(), added.id)).collect())
        });
        Ok(Tokenizer {
            tokens,
            vocabulary,
            merges,
            byte_ids,
            ignore_merges: self.ignore_merges,
            added,
            is_special,
            matchers,
        })
    }
}

/// The bytes of the vocabulary by id. Ids are 0 up to the number of tokens, each once.
fn build_tokens(vocab: &[(Cow<str>, u32)]) -> Result<Vec<Arc<[u8]>>> {
    let count = vocab.len();
    let mut by_id: Vec<Option<&str>> = vec![None; count];
    for (token, id) in vocab {
        let Some(place) = by_id.get_mut(*id as usize) else {
            bail!(
                "the id {id} of {token:?} is out of range: {count} tokens have the ids from 0 up"
            );
        };
        if let Some(first) = place.replace(token) {
            bail!("the id {id} is given to both {first:?} and {token:?}");
        }
    }
    let spelled = |(id, token): (usize, &str)| match spell(token) {
        Ok(bytes) => Ok(bytes.into()),
        Err(char) => bail!("{token:?}, id {id}: the character {char:?} stands for no byte"),
    };
    by_id.into_iter().flatten().enumerate().map(spelled).collect()
}

/// Checks the ids of added tokens: each is that of the same token of the vocabulary or, for one
/// outside, which is appended to `tokens`, the next.
fn number_added(added: &[Added], tokens: &mut Vec<Arc<[u8]>>) -> Result<()> {
    let mut contents = HashSet::new();
    let words = tokens.len();
    for (at, Added { content, id, .. }) in added.iter().enumerate() {
        if !contents.insert(content) {
            bail!("added_tokens: {content:?} occurs twice");
        }
        // One that the alphabet cannot spell stands for its own text; the decoder treats it so.
        let bytes = spell(content).unwrap_or_else(|_| content.as_bytes().to_vec());
        let next = tokens.len();
        if *id as usize == next {
            tokens.push(bytes.into());
        } else if tokens[..words].get(*id as usize).is_none_or(|word| **word != *bytes) {
            bail!("added_tokens[{at}]: the id of {content:?} is {id}, by its place it is {next}");
        }
    }
    Ok(())
}

/// The merges by ids.
fn build_merges(lines: &[Cow<str>], vocabulary: &Vocabulary, seeded: Seeded) -> Result<Merges> {
    let mut merges = Merges::with_capacity_and_hasher(lines.len(), seeded);
    let find = |token: &str| -> Result<u32> {
        match spell(token).ok().and_then(|bytes| vocabulary.get(&bytes[..])) {
            Some(id) => Ok(*id),
            None => bail!("{token:?} is not in the vocabulary"),
        }
    };
    for (rank, line) in (0..).zip(lines) {
        let mut enter = || {
            let pair = line.split_once(' ').filter(|(_, right)| !right.contains(' '));
            let Some((left, right)) = pair else {
                bail!("expected two tokens with one space between them, found {line:?}");
            };
            let id = find(&[left, right].concat())?;
            if merges.insert((find(left)?, find(right)?), Merge { rank, id }).is_some() {
                bail!("the pair {left:?} {right:?} occurs twice");
            }
            Ok(())
        };
        enter().context(|| format!("model.merges[{rank}]"))?;
    }
    Ok(merges)
}

/// The bytes that stand for characters in the byte-level alphabet, in which tokenizer.json writes
/// tokens: printable Latin-1 characters are their own byte, the other 68 bytes follow from U+0100.
const BYTES_OF_CHARS: [Option<u8>; 0x144] = {
    let mut bytes = [None; 0x144];
    let (mut byte, mut others) = (0, 0);
    while byte < 256 {
        let printable = matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
        let char = if printable { byte } else { 0x100 + others };
        others += !printable as usize;
        bytes[char] = Some(byte as u8);
        byte += 1;
    }
    assert!(others == 68);
    bytes
};

/// The bytes that `token` spells; the error is a character that is not in the alphabet.
fn spell(token: &str) -> std::result::Result<Vec<u8>, char> {
    let mut bytes = Vec::with_capacity(token.len());
    for char in token.chars() {
        let byte = BYTES_OF_CHARS.get(u32::from(char) as usize).copied().flatten();
        bytes.push(byte.ok_or(char)?);
    }
    Ok(bytes)
}
