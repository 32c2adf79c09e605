//! Reads tokenizer.json and checks that it is what this crate implements.
//!
//! Owns the meaning of every field: one that would change ids or text and is not implemented is
//! refused by name and value; so is an unknown one. Only the post-processor is passed over, since
//! it adds tokens around a text, which [`Tokenizer::encode`] never does. Any input gives a
//! tokenizer or one error, in time and memory proportional to its length.

#![forbid(unsafe_code)]

use super::bpe::{Arena, Merges, Vocabulary};
use super::scanner::SPLIT_PATTERN;
use super::{Added, Matcher, Tokenizer};
use crate::bail;
use crate::error::{Context, Result};
use crate::json::{self, Kind, Limits, Reader, Value};
use crate::sys::read_file;
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::path::Path;

/// The largest file that is read; GLM-5.2's has 10 MB.
const FILE_BYTES_MAX: usize = 64 << 20;

/// The longest added token. At each place of a text where one may start, as many bytes are compared
/// at most; GLM-5.2's longest has 26.
const ADDED_BYTES_MAX: usize = 1024;

/// Longest excerpt of a value in an error, in characters.
const EXCERPT_CHARS_MAX: usize = 120;

impl Tokenizer {
    /// Reads the file `path`, a tokenizer.json.
    ///
    /// # Errors
    /// The file cannot be read, is malformed, or asks for something that is not implemented.
    pub fn load(path: &Path) -> Result<Tokenizer> {
        let read = || {
            let bytes = read_file(path, FILE_BYTES_MAX)?;
            Tokenizer::from_bytes(&bytes)
        };
        read().context(|| path.display())
    }

    /// The tokenizer that the bytes of a tokenizer.json describe.
    ///
    /// # Errors
    /// As [`Tokenizer::load`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Tokenizer> {
        read_document(bytes)?.build()
    }
}

/// What a tokenizer.json holds, syntax and fixed fields checked.
struct Document<'a> {
    added: Vec<AddedEntry>,
    model: Model<'a>,
}

/// One element of `added_tokens`.
struct AddedEntry {
    content: String,
    id: u32,
    special: bool,
    normalized: bool,
}

/// The field `model`. Strings are in the byte-level alphabet, as in the file.
#[derive(Default)]
struct Model<'a> {
    ignore_merges: bool,
    vocab: Vec<(Cow<'a, str>, u32)>,
    merges: Vec<(Cow<'a, str>, Cow<'a, str>)>,
}

fn read_document(bytes: &[u8]) -> Result<Document<'_>> {
    let limits = Limits { max_bytes: FILE_BYTES_MAX, ..Limits::default() };
    let mut reader = Reader::new(bytes, limits)?;
    let (mut added, mut model) = (Vec::new(), None);
    let mut seen = Fields::default();
    reader.begin_object()?;
    while let Some(key) = reader.next_key()? {
        seen.enter(&key)?;
        match &*key {
            "version" => {
                expect(&key, &reader.value()?, "1.0", |value| value.as_str() == Some("1.0"))?
            }
            "truncation" | "padding" | "normalizer" => {
                expect(&key, &reader.value()?, "null", Value::is_null)?;
            }
            "added_tokens" => added = read_added(&mut reader)?,
            "pre_tokenizer" => check_pre_tokenizer(&reader.value()?)?,
            "post_processor" => reader.skip()?,
            "decoder" => check_byte_level("decoder", &reader.value()?, &[])?,
            "model" => model = Some(read_model(&mut reader).context(|| "model")?),
            _ => bail!("unknown field {key:?}"),
        }
    }
    reader.finish()?;
    seen.require(&["pre_tokenizer", "decoder"])?;
    let Some(model) = model else { bail!("the field \"model\" is missing") };
    Ok(Document { added, model })
}

/// The fields of one object met so far; they are few.
#[derive(Default)]
struct Fields(Vec<String>);

impl Fields {
    fn enter(&mut self, key: &str) -> Result<()> {
        if self.0.iter().any(|seen| seen == key) {
            bail!("the field {key:?} occurs twice");
        }
        self.0.push(key.to_string());
        Ok(())
    }

    fn require(&self, keys: &[&str]) -> Result<()> {
        match keys.iter().find(|key| !self.0.iter().any(|seen| seen == *key)) {
            Some(key) => bail!("the field {key:?} is missing"),
            None => Ok(()),
        }
    }
}

/// Refuses a `value` that `accept` does not take.
fn expect(name: &str, value: &Value, wanted: &str, accept: impl Fn(&Value) -> bool) -> Result<()> {
    if accept(value) {
        return Ok(());
    }
    bail!("{name} is not implemented: expected {wanted}, found {}", excerpt(value));
}

/// `value` as JSON, cut when long.
fn excerpt(value: &Value) -> String {
    let text = json::to_compact(value);
    match text.char_indices().nth(EXCERPT_CHARS_MAX) {
        Some((cut, _)) => format!("{}…", &text[..cut]),
        None => text,
    }
}

/// Checks that the object `value` has exactly the `wanted` members and perhaps `also` some others
/// that have no influence.
fn check_object(name: &str, value: &Value, wanted: &[(&str, Value)], also: &[&str]) -> Result<()> {
    let Some(members) = value.as_object() else {
        bail!("{name} is not implemented: expected an object, found {}", excerpt(value));
    };
    for (key, wanted) in wanted {
        let path = format!("{name}.{key}");
        match value.get(key) {
            Some(found) => expect(&path, found, &excerpt(wanted), |found| found == wanted)?,
            None => bail!("{path} is missing: expected {}", excerpt(wanted)),
        }
    }
    let known = |key: &str| wanted.iter().any(|(wanted, _)| *wanted == key) || also.contains(&key);
    match members.iter().find(|(key, _)| !known(key)) {
        Some((key, _)) => bail!("{name}: unknown field {key:?}"),
        None => Ok(()),
    }
}

/// A `ByteLevel` step; its switches only matter to a pre-tokenizer.
fn check_byte_level(name: &str, value: &Value, switches: &[(&str, Value)]) -> Result<()> {
    let mut wanted = vec![("type", Value::String("ByteLevel".into()))];
    wanted.extend_from_slice(switches);
    check_object(name, value, &wanted, &["add_prefix_space", "trim_offsets", "use_regex"])
}

/// The pre-tokenizer is GLM's: the split rule, each match and each gap a piece; then bytes.
fn check_pre_tokenizer(value: &Value) -> Result<()> {
    let name = "pre_tokenizer";
    let string = |text: &str| Value::String(text.into());
    expect(
        &format!("{name}.type"),
        value.get("type").unwrap_or(&Value::Null),
        "\"Sequence\"",
        |kind| kind.as_str() == Some("Sequence"),
    )?;
    check_object(name, value, &[("type", string("Sequence"))], &["pretokenizers"])?;
    let steps = value.get("pretokenizers").and_then(Value::as_array);
    let Some([split, byte_level]) = steps else {
        bail!("{name}.pretokenizers is not implemented: expected a Split and a ByteLevel step");
    };
    let pattern = Value::Object(vec![("Regex".into(), string(SPLIT_PATTERN))]);
    let wanted = [
        ("type", string("Split")),
        ("pattern", pattern),
        ("behavior", string("Isolated")),
        ("invert", Value::Bool(false)),
    ];
    check_object("pre_tokenizer.pretokenizers[0]", split, &wanted, &[])?;
    let switches = [("add_prefix_space", Value::Bool(false)), ("use_regex", Value::Bool(false))];
    check_byte_level("pre_tokenizer.pretokenizers[1]", byte_level, &switches)
}

fn read_added(reader: &mut Reader) -> Result<Vec<AddedEntry>> {
    let mut added = Vec::new();
    reader.begin_array()?;
    while reader.next_element()? {
        let entry =
            read_added_entry(reader).context(|| format!("added_tokens[{}]", added.len()))?;
        added.push(entry);
    }
    Ok(added)
}

fn read_added_entry(reader: &mut Reader) -> Result<AddedEntry> {
    let mut entry = AddedEntry { content: String::new(), id: 0, special: false, normalized: false };
    let mut seen = Fields::default();
    reader.begin_object()?;
    while let Some(key) = reader.next_key()? {
        seen.enter(&key)?;
        match &*key {
            "id" => entry.id = read_id(reader)?,
            "content" => entry.content = reader.string()?.into_owned(),
            "special" => entry.special = reader.bool()?,
            "normalized" => entry.normalized = reader.bool()?,
            "single_word" | "lstrip" | "rstrip" => {
                expect(&key, &Value::Bool(reader.bool()?), "false", |value| {
                    value.as_bool() == Some(false)
                })?;
            }
            _ => bail!("unknown field {key:?}"),
        }
    }
    seen.require(&["id", "content", "special", "normalized", "single_word", "lstrip", "rstrip"])?;
    match entry.content.len() {
        1..=ADDED_BYTES_MAX => Ok(entry),
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

fn read_model<'a>(reader: &mut Reader<'a>) -> Result<Model<'a>> {
    let mut model = Model::default();
    let mut seen = Fields::default();
    reader.begin_object()?;
    while let Some(key) = reader.next_key()? {
        seen.enter(&key)?;
        match &*key {
            "type" => {
                expect(&key, &reader.value()?, "\"BPE\"", |kind| kind.as_str() == Some("BPE"))?
            }
            "dropout" | "unk_token" => expect(&key, &reader.value()?, "null", Value::is_null)?,
            "continuing_subword_prefix" | "end_of_word_suffix" => {
                expect(&key, &reader.value()?, "null or \"\"", |value| {
                    value.is_null() || value.as_str() == Some("")
                })?;
            }
            "byte_fallback" => {
                expect(&key, &reader.value()?, "false", |value| value.as_bool() == Some(false))?;
            }
            // Says how unknown tokens are joined; there are none.
            "fuse_unk" => drop(reader.bool()?),
            "ignore_merges" => model.ignore_merges = reader.bool()?,
            "vocab" => model.vocab = read_vocab(reader).context(|| "vocab")?,
            "merges" => model.merges = read_merges(reader).context(|| "merges")?,
            _ => bail!("unknown field {key:?}"),
        }
    }
    seen.require(&["type", "vocab", "merges"])?;
    Ok(model)
}

fn read_vocab<'a>(reader: &mut Reader<'a>) -> Result<Vec<(Cow<'a, str>, u32)>> {
    let mut vocab = Vec::new();
    reader.begin_object()?;
    while let Some(token) = reader.next_key()? {
        vocab.push((token, read_id(reader)?));
    }
    Ok(vocab)
}

/// The list of merges, all spelled `"a b"` or all `["a", "b"]`.
fn read_merges<'a>(reader: &mut Reader<'a>) -> Result<Vec<(Cow<'a, str>, Cow<'a, str>)>> {
    let mut merges = Vec::new();
    let mut spelling = None;
    reader.begin_array()?;
    while reader.next_element()? {
        let (at, kind) = (reader.offset(), reader.peek()?);
        if *spelling.get_or_insert(kind) != kind {
            return Err(reader.error_at(at, "merges are spelled both as strings and as pairs"));
        }
        if kind == Kind::Array {
            merges.push(read_pair(reader)?);
        } else {
            let line = reader.string()?;
            // A comment, also when it looks like a merge.
            if !line.starts_with("#version") {
                let message = "expected two tokens with one space between them";
                merges.push(split_pair(line).ok_or_else(|| reader.error_at(at, message))?);
            }
        }
    }
    Ok(merges)
}

fn read_pair<'a>(reader: &mut Reader<'a>) -> Result<(Cow<'a, str>, Cow<'a, str>)> {
    let at = reader.offset();
    let mut pair = [Cow::Borrowed(""), Cow::Borrowed("")];
    let mut count = 0;
    reader.begin_array()?;
    while reader.next_element()? {
        let token = reader.string()?;
        if let Some(place) = pair.get_mut(count) {
            *place = token;
        }
        count += 1;
    }
    if count != 2 {
        return Err(reader.error_at(at, &format!("expected a pair of tokens, found {count}")));
    }
    let [left, right] = pair;
    Ok((left, right))
}

/// Splits at the only space.
fn split_pair(line: Cow<str>) -> Option<(Cow<str>, Cow<str>)> {
    fn halves(line: &str) -> Option<(&str, &str)> {
        line.split_once(' ').filter(|(_, right)| !right.contains(' '))
    }
    Some(match line {
        Cow::Borrowed(line) => {
            let (left, right) = halves(line)?;
            (left.into(), right.into())
        }
        Cow::Owned(line) => {
            let (left, right) = halves(&line)?;
            (left.to_string().into(), right.to_string().into())
        }
    })
}

impl Document<'_> {
    /// Builds the tables, checking every reference.
    fn build(self) -> Result<Tokenizer> {
        let Model { ignore_merges, vocab, merges } = self.model;
        let mut tokens = build_tokens(vocab).context(|| "model.vocab")?;
        let mut vocabulary = Vocabulary::with_capacity(tokens.len());
        for id in 0..tokens.len() as u32 {
            if let Some(first) = vocabulary.insert(&tokens, id) {
                bail!("model.vocab: a token occurs twice, with the ids {first} and {id}");
            }
        }
        let vocabulary_len = tokens.len();
        let added = build_added(self.added, &vocabulary, &mut tokens)?;
        let shadowed: BTreeSet<u32> = added
            .iter()
            .map(|(added, _)| added.id)
            .filter(|&id| (id as usize) < vocabulary_len)
            .collect();
        let byte_ids = build_byte_ids(&vocabulary, &tokens, &shadowed)?;
        let merges = build_merges(merges, &vocabulary, &tokens, &shadowed)?;
        let members =
            |normalized| (0..added.len()).filter(|&at| added[at].1 == normalized).collect();
        let members = [members(false), members(true)];
        let added: Vec<Added> = added.into_iter().map(|(added, _)| added).collect();
        let mut added_by_id: Vec<usize> = (0..added.len()).collect();
        added_by_id.sort_by_key(|&at| added[at].id);
        Ok(Tokenizer {
            tokens,
            vocabulary,
            merges,
            byte_ids,
            ignore_merges,
            matchers: members.map(|members| Matcher::new(&added, members)),
            added,
            added_by_id,
            added_in_vocabulary: !shadowed.is_empty(),
        })
    }
}

/// The bytes of the vocabulary by id. Ids are 0 up to the number of tokens, each once.
fn build_tokens(vocab: Vec<(Cow<str>, u32)>) -> Result<Arena> {
    let count = vocab.len();
    let mut by_id: Vec<Option<&str>> = vec![None; count];
    for (token, id) in &vocab {
        let Some(place) = by_id.get_mut(*id as usize) else {
            bail!(
                "the id {id} of {token:?} is out of range: {count} tokens have the ids from 0 up"
            );
        };
        if let Some(first) = place.replace(token) {
            bail!("the id {id} is given to both {first:?} and {token:?}");
        }
    }
    let mut tokens = Arena::default();
    let mut bytes = Vec::new();
    for (id, token) in by_id.into_iter().flatten().enumerate() {
        if let Err(char) = spell(token, &mut bytes) {
            bail!("{token:?}, id {id}: the character {char:?} stands for no byte");
        }
        tokens.push(&bytes);
    }
    Ok(tokens)
}

/// The added tokens in ascending order of content, each with its flag `normalized`. Those that are
/// not in the vocabulary are appended to `tokens`.
fn build_added(
    entries: Vec<AddedEntry>,
    vocabulary: &Vocabulary,
    tokens: &mut Arena,
) -> Result<Vec<(Added, bool)>> {
    let mut added = Vec::with_capacity(entries.len());
    let mut bytes = Vec::new();
    for (at, entry) in entries.into_iter().enumerate() {
        let AddedEntry { content, id, special, normalized } = entry;
        let mut present = None;
        match spell(&content, &mut bytes) {
            Ok(()) => present = vocabulary.get(tokens, &bytes),
            // Such a token stands for its own text; the decoder treats it so.
            Err(_) => content.as_bytes().clone_into(&mut bytes),
        }
        // Numbering is by order, whatever the file says; here both have to agree.
        let expected = present.unwrap_or(tokens.len() as u32);
        if id != expected {
            bail!(
                "added_tokens[{at}]: the id of {content:?} is {id}, by its place it is {expected}"
            );
        }
        if present.is_none() {
            tokens.push(&bytes);
        }
        added.push((Added { content, id, special }, normalized));
    }
    added.sort_by(|(a, _), (b, _)| a.content.cmp(&b.content));
    if let Some(pair) = added.windows(2).find(|pair| pair[0].0.content == pair[1].0.content) {
        bail!("added_tokens: {:?} occurs twice", pair[0].0.content);
    }
    Ok(added)
}

/// The token of each single byte: without one, some text could not be written at all.
fn build_byte_ids(
    vocabulary: &Vocabulary,
    tokens: &Arena,
    shadowed: &BTreeSet<u32>,
) -> Result<[u32; 256]> {
    let mut byte_ids = [0; 256];
    for byte in 0..=255 {
        match vocabulary.get(tokens, &[byte]) {
            Some(id) if !shadowed.contains(&id) => byte_ids[usize::from(byte)] = id,
            Some(_) => bail!("added_tokens: the token of the single byte 0x{byte:02x} is added"),
            None => bail!("model.vocab: no token for the single byte 0x{byte:02x}"),
        }
    }
    Ok(byte_ids)
}

/// The merges by ids. An added token takes part in none, as text must not lead to it.
fn build_merges(
    pairs: Vec<(Cow<str>, Cow<str>)>,
    vocabulary: &Vocabulary,
    tokens: &Arena,
    shadowed: &BTreeSet<u32>,
) -> Result<Merges> {
    let mut merges = Merges::with_capacity(pairs.len());
    let mut bytes = Vec::new();
    let mut find = |token: &str| -> Result<u32> {
        let id = spell(token, &mut bytes).ok().and_then(|()| vocabulary.get(tokens, &bytes));
        match id {
            Some(id) if !shadowed.contains(&id) => Ok(id),
            Some(_) => bail!("{token:?} is an added token"),
            None => bail!("{token:?} is not in the vocabulary"),
        }
    };
    let mut merged = String::new();
    for (at, (left, right)) in pairs.iter().enumerate() {
        merged.clear();
        merged.push_str(left);
        merged.push_str(right);
        let mut entered = || -> Result<bool> {
            let (left, right, merged) = (find(left)?, find(right)?, find(&merged)?);
            Ok(merges.insert(left, right, at as u32, merged))
        };
        if !entered().context(|| format!("model.merges[{at}]"))? {
            bail!("model.merges[{at}]: the pair {left:?} {right:?} occurs twice");
        }
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

/// Writes the bytes that `token` spells into `bytes`; the error is a character that is not in the
/// alphabet.
fn spell(token: &str, bytes: &mut Vec<u8>) -> std::result::Result<(), char> {
    bytes.clear();
    for char in token.chars() {
        let byte = BYTES_OF_CHARS.get(u32::from(char) as usize).copied().flatten();
        bytes.push(byte.ok_or(char)?);
    }
    Ok(())
}
