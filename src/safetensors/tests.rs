//! Tests of the tensor directory. Headers are written out by hand, from the format's definition.

use super::*;
use std::fmt::Write;
use std::sync::atomic::{AtomicU32, Ordering};

/// A directory that is removed when the test ends.
struct TempDir(PathBuf);

impl TempDir {
    fn new() -> TempDir {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("colibri-safetensors-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        TempDir(path)
    }

    fn write(&self, file: &str, bytes: &[u8]) -> &TempDir {
        std::fs::write(self.0.join(file), bytes).unwrap();
        self
    }

    fn shard(&self, file: &str, header: &str, data_bytes: usize) -> &TempDir {
        self.write(file, &shard_bytes(header, data_bytes))
    }

    fn open(&self) -> Directory {
        Directory::open(&self.0).unwrap()
    }

    /// The error text, the temporary path cut out.
    fn refusal(&self) -> String {
        let error = Directory::open(&self.0).map(|directory| directory.len()).unwrap_err();
        error.to_string().replace(self.0.to_str().unwrap(), "DIR")
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn shard_bytes(header: &str, data_bytes: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data_bytes, 0);
    bytes
}

/// `refusal` of a directory with one shard.
fn one_shard_refusal(header: &str, data_bytes: usize) -> String {
    TempDir::new().shard("a.safetensors", header, data_bytes).refusal()
}

const ONE_BYTE: &str = r#"{"NAME":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;

fn one_tensor(name: &str) -> String {
    ONE_BYTE.replace("NAME", name)
}

#[test]
fn tensors_of_several_shards_are_found_with_absolute_offsets() {
    let dir = TempDir::new();
    let header = r#"{"__metadata__":{"format":"pt","transformers_version":"5"},
        "b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},
        "a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},
        "none":{"dtype":"F32","shape":[0,7],"data_offsets":[16,16]}}   "#;
    dir.shard("model.safetensors", header, 16).shard("._model.safetensors", "junk", 0);
    // The empty shard that the converter really writes: length word 8, `{}`, six spaces.
    dir.write("out-00000.safetensors", b"\x08\0\0\0\0\0\0\0{}      ");
    dir.shard("z.safetensors", &one_tensor("c"), 1).write("model.safetensors.index.json", b"{");
    let directory = dir.open();
    let names: Vec<&str> = directory.iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["a", "b", "none", "c"]);
    let b = directory.get("b").unwrap();
    let expected = Tensor {
        shard: 0,
        offset: 8 + header.len() as u64 + 4,
        bytes: 12,
        dtype: Dtype::Bf16,
        shape: [2, 3].into(),
    };
    assert_eq!(*b, expected);
    assert_eq!((b.elements(), directory.get("a").unwrap().elements()), (6, 1));
    assert_eq!(directory.shards().len(), 3);
    assert_eq!(directory.shard(directory.get("c").unwrap()).bytes, 8 + 53 + 1);
    assert!(directory.get("d").is_none() && directory.len() == 4);
}

#[test]
fn every_official_dtype_parses_and_others_are_named() {
    let official = "F64 F32 F16 BF16 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ F6_E2M3 \
                    F6_E3M2 F4 C64 U64 I64 U32 I32 U16 I16 U8 I8 BOOL";
    let bytes = [8, 4, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 8, 8, 8, 4, 4, 2, 2, 1, 1, 1];
    for (name, bytes) in official.split_whitespace().zip(bytes) {
        let dtype = Dtype::parse(name).unwrap_or_else(|| panic!("{name} does not parse"));
        assert_eq!((dtype.name(), dtype.size_bytes()), (name, bytes));
    }
    for alias in ["F8_E4M3FN", "float8_e4m3fn"] {
        assert_eq!(Dtype::parse(alias), Some(Dtype::F8E4m3));
    }
    assert_eq!(Dtype::parse("F8_E8M0FNU"), Some(Dtype::F8E8m0));
    assert_eq!(
        one_shard_refusal(&one_tensor("x").replace("U8", "F7"), 1),
        "DIR/a.safetensors: header: tensor x: unknown dtype \"F7\" at byte 14 (line 1, column 15)"
    );
    // Packed types: 4 elements of 6 bits are 3 bytes, 3 are no whole number.
    let packed = r#"{"p":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}"#;
    assert_eq!(TempDir::new().shard("a.safetensors", packed, 3).open().len(), 1);
    assert!(one_shard_refusal(&packed.replace("[4]", "[3]"), 3).contains("18 bits, no whole"));
}

#[test]
fn shape_and_byte_count_must_agree() {
    let header = r#"{"w":{"dtype":"F32","shape":[4,4],"data_offsets":[0,8]}}"#;
    assert_eq!(
        one_shard_refusal(header, 8),
        "DIR/a.safetensors: tensor w: expected 64 bytes for F32 [4, 4], found 8 \
         (data_offsets 0 to 8)"
    );
    let header = r#"{"w":{"dtype":"F32","shape":[1000,1000],"data_offsets":[0,4]}}"#;
    assert!(one_shard_refusal(header, 4).contains("tensor w: expected 4000000 bytes"));
}

#[test]
fn size_arithmetic_cannot_wrap() {
    let two33 = 1u64 << 33;
    let header =
        format!(r#"{{"w":{{"dtype":"F32","shape":[{two33},{two33}],"data_offsets":[0,0]}}}}"#);
    let message = one_shard_refusal(&header, 0);
    assert!(message.contains("tensor w: the size of F32 [8589934592, 8589934592] overflows"));
    // 2^61 elements of 8 bytes wrap to 0 bytes; a zero dimension does not hide the others.
    let header = r#"{"w":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}}"#;
    assert!(one_shard_refusal(header, 0).contains("overflows"));
    let begin = (1u64 << 63) - 1;
    let header =
        format!(r#"{{"w":{{"dtype":"U8","shape":[8],"data_offsets":[{begin},{}]}}}}"#, begin + 8);
    assert!(one_shard_refusal(&header, 8).contains("data offsets 0 to 9223372036854775807"));
    let header = r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[18446744073709551616,1]}}"#;
    assert!(one_shard_refusal(header, 1).contains("found \"18446744073709551616\""));
    let header = r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[2,1]}}"#;
    assert!(one_shard_refusal(header, 1).contains("begin at 2, after their end 1"));
}

#[test]
fn malformed_headers_are_refused_with_their_position() {
    for (header, expected) in [
        ("{a:1}", "expected a key in double quotes, found 'a' at byte 1"),
        ("{", "found the end of the text at byte 1"),
        ("{\"a\"", "expected ':', found the end of the text at byte 4"),
        ("[]", "expected an object, found '[' at byte 0"),
        ("{}{}", "expected the end of the document, found '{' at byte 2"),
        ("", "expected an object, found the end of the text at byte 0"),
        (
            r#"{"a":{"shape":[],"data_offsets":[0,0]}}"#,
            "tensor a: the key \"dtype\" is missing at byte 5",
        ),
        (r#"{"a":{"dtype":"U8","data_offsets":[0,0]}}"#, "\"shape\" is missing"),
        (r#"{"a":{"dtype":"U8","shape":[0]}}"#, "\"data_offsets\" is missing"),
        (r#"{"a":{"dtype":"U8","dtype":"U8"}}"#, "\"dtype\" occurs twice"),
        (r#"{"a":{"shape":[1,1,1,1,1,1,1,1,1]}}"#, "shape of more than 8 dimensions at byte 31"),
        (r#"{"a":{"shape":[-1]}}"#, "from 0 to 18446744073709551615, found \"-1\" at byte 15"),
        (r#"{"a":{"shape":[1.0]}}"#, "found \"1.0\""),
        (r#"{"a":{"data_offsets":[0]}}"#, "expected two data_offsets, found 1"),
        (r#"{"a":{"data_offsets":[0,0,0]}}"#, "expected two data_offsets, found 3"),
        (r#"{"__metadata__":{"a":1}}"#, "__metadata__: expected a string, found '1'"),
        (r#"{"__metadata__":{},"__metadata__":{}}"#, "__metadata__ occurs twice"),
    ] {
        let message = one_shard_refusal(header, 0);
        assert!(message.starts_with("DIR/a.safetensors: header: "), "{header}: {message}");
        assert!(message.contains(expected), "{header}: {message}");
    }
    let long = one_shard_refusal(&one_tensor(&"n".repeat(1025)), 1);
    assert!(long.contains("tensor name of 1025 bytes, at most 1024 allowed"), "{long}");
}

#[test]
fn header_length_is_checked_before_anything_is_allocated() {
    let mut bytes = vec![0xFF; 8];
    bytes.resize(20, b' ');
    let dir = TempDir::new();
    assert_eq!(
        dir.write("a.safetensors", &bytes).refusal(),
        "DIR/a.safetensors: header of 18446744073709551615 bytes at offset 8 reaches beyond the \
         file of 20 bytes"
    );
    let message = TempDir::new().write("a.safetensors", b"1234567").refusal();
    assert!(message.contains("at least 8 bytes of header length, found a file of 7 bytes"));
    // A sparse file long enough for the length it claims meets the cap.
    let cap = (512u64 << 20) + 1;
    let file = File::create(dir.0.join("a.safetensors")).unwrap();
    std::io::Write::write_all(&mut &file, &cap.to_le_bytes()).unwrap();
    file.set_len(cap + 8).unwrap();
    let message = dir.refusal();
    assert!(message.contains("header of 536870913 bytes, at most 536870912 allowed"), "{message}");
}

#[test]
fn header_that_shrinks_while_read_is_a_short_read() {
    let bytes = shard_bytes(&one_tensor("x"), 1);
    let message = header::read(&bytes[..20], bytes.len() as u64).unwrap_err().to_string();
    assert_eq!(message, "header at offset 8: expected 53 bytes, the file gave 12");
}

#[test]
fn data_region_must_be_tiled_exactly() {
    let pair = |a: &str, b: &str, data_bytes: usize| {
        let header = format!(
            r#"{{"b":{{"dtype":"U8","shape":[8],"data_offsets":{b}}},
                "a":{{"dtype":"U8","shape":[8],"data_offsets":{a}}}}}"#
        );
        let dir = TempDir::new();
        dir.shard("a.safetensors", &header, data_bytes);
        Directory::open(&dir.0)
            .map(|directory| directory.len())
            .map_err(|error| error.to_string().split("safetensors: ").nth(1).unwrap().to_string())
    };
    assert_eq!(pair("[0,8]", "[8,16]", 16), Ok(2));
    assert_eq!(pair("[8,16]", "[0,8]", 16), Ok(2));
    let refusal = |result: std::result::Result<usize, String>| result.unwrap_err();
    assert_eq!(
        refusal(pair("[0,8]", "[4,12]", 16)),
        "tensor b begins at data offset 4, inside tensor a, which ends at 8"
    );
    assert_eq!(
        refusal(pair("[0,8]", "[0,8]", 16)),
        "tensor a begins at data offset 0, inside tensor b, which ends at 8"
    );
    assert_eq!(
        refusal(pair("[0,8]", "[9,17]", 17)),
        "data offsets 8 to 9, between a and tensor b, belong to no tensor"
    );
    assert_eq!(
        refusal(pair("[1,9]", "[9,17]", 17)),
        "data offsets 0 to 1, between the header and tensor a, belong to no tensor"
    );
    assert_eq!(
        refusal(pair("[0,8]", "[8,16]", 17)),
        "1 bytes after b, the last tensor, belong to no tensor"
    );
    assert_eq!(
        refusal(pair("[0,8]", "[8,16]", 15)),
        "tensor b ends at data offset 16, but the file holds 15 bytes of data: it is truncated"
    );
    assert!(one_shard_refusal("{}", 16).contains("16 bytes after the header"));
}

#[test]
fn a_name_in_two_shards_or_twice_in_one_is_refused_naming_both_files() {
    let dir = TempDir::new();
    dir.shard("x.safetensors", &one_tensor("model.norm.weight"), 1);
    dir.shard("y.safetensors", &one_tensor("model.norm.weight"), 1);
    assert_eq!(
        dir.refusal(),
        "DIR/y.safetensors: tensor model.norm.weight: defined here and in DIR/x.safetensors"
    );
    let twice = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},
        "\u0061":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#;
    assert_eq!(
        one_shard_refusal(twice, 2),
        "DIR/a.safetensors: tensor a: defined here and in DIR/a.safetensors"
    );
}

/// Opens a directory of one-tensor shards with these names.
fn open_names(names: &[&str]) -> std::result::Result<usize, String> {
    let dir = TempDir::new();
    for name in names {
        dir.shard(&format!("{name}.safetensors"), &one_tensor(name), 1);
    }
    let opened = Directory::open(&dir.0).map(|directory| directory.len());
    opened.map_err(|error| error.to_string().replace(dir.0.to_str().unwrap(), "DIR"))
}

#[test]
fn missing_numbered_shards_are_named_per_family() {
    let missing = |names: &[&str]| open_names(names).unwrap_err();
    assert_eq!(
        missing(&["out-00000", "out-00002", "out-mtp-00000"]),
        "DIR: shards: out-00001.safetensors is missing; out-00002.safetensors is there"
    );
    assert!(missing(&["out-00001"]).contains("out-00000.safetensors is missing"));
    assert!(missing(&["out-00000", "out-mtp-00001"]).contains("out-mtp-00000.safetensors is"));
    assert!(missing(&["out-00000", "out-idx-00000", "out-idx-00002"]).contains("out-idx-00001."));
    let of = |number: u64| format!("model-{number:05}-of-00006");
    let all: Vec<String> = (1..=6).map(of).collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    assert_eq!(open_names(&all), Ok(6));
    assert_eq!(missing(&all[..5]), "DIR: shards: model-00006-of-00006.safetensors is missing");
    assert!(missing(&[all[0], all[2]]).contains("model-00002-of-00006.safetensors is missing"));
    assert!(missing(&all[1..]).contains("model-00001-of-00006.safetensors is missing"));
    assert!(missing(&["m-00000-of-00001"]).contains("m-00000-of-00001.safetensors does not fit"));
    assert!(missing(&["m-00001-of-00001", "m-00002-of-00001"]).contains("beyond the 1 shards"));
    assert!(missing(&["m-00001-of-999999999999999999"]).contains("m-00002-of-"));
    assert_eq!(open_names(&["out-00000", "out-00001", "out-mtp-00000", "out-idx-00000"]), Ok(4));
    assert_eq!(open_names(&["model", "weights-20250101", "weights-20250301", "out-5"]), Ok(4));
}

#[test]
fn directories_without_usable_shards_are_refused() {
    assert_eq!(TempDir::new().refusal(), "DIR: no .safetensors file in this directory");
    let dir = TempDir::new();
    std::fs::create_dir(dir.0.join("a.safetensors")).unwrap();
    assert_eq!(dir.refusal(), "DIR/a.safetensors: expected a regular file");
    assert!(Directory::open(Path::new("/nonexistent/model")).is_err());
    let dir = TempDir::new();
    for number in 0..513 {
        dir.write(&format!("m{number}.safetensors"), b"");
    }
    assert_eq!(dir.refusal(), "DIR: more than 512 .safetensors files");
}

#[cfg(unix)]
#[test]
fn symlinked_shards_are_followed_and_broken_links_named() {
    let (dir, store) = (TempDir::new(), TempDir::new());
    store.shard("blob", &one_tensor("x"), 1);
    std::os::unix::fs::symlink(store.0.join("blob"), dir.0.join("a.safetensors")).unwrap();
    assert_eq!(dir.open().len(), 1);
    std::fs::remove_file(store.0.join("blob")).unwrap();
    assert!(dir.refusal().starts_with("DIR/a.safetensors: "));
}

fn stamped(name: &str, stamp: &str) -> String {
    let mut text = String::new();
    crate::json::write_str_compact(&mut text, stamp);
    one_tensor(name).replacen('{', &format!("{{\"__metadata__\":{{\"colibri.fmt\":{text}}},"), 1)
}

#[test]
fn format_stamps_agree_or_are_refused() {
    let dir = TempDir::new();
    dir.shard("a.safetensors", &stamped("x", r#"{"x":"int8-row","y":"fp8-e4m3-b128"}"#), 1);
    dir.shard("b.safetensors", &stamped("y", r#"{"x":"int8-row"}"#), 1);
    let directory = dir.open();
    assert_eq!(directory.stamp("x"), Some("int8-row"));
    assert_eq!(directory.stamp("y"), Some("fp8-e4m3-b128"));
    assert_eq!(directory.stamp("z"), None);
    dir.shard("b.safetensors", &stamped("y", r#"{"y":"int8-row"}"#), 1);
    let message = dir.refusal();
    let expected = "DIR/b.safetensors: metadata colibri.fmt: tensor y is stamped \"int8-row\", \
                    elsewhere \"fp8-e4m3-b128\"";
    assert_eq!(message, expected);
    for (stamp, expected) in [
        ("{x}", "colibri.fmt: expected a key in double quotes"),
        (r#"["x"]"#, "colibri.fmt: expected an object"),
        (r#"{"x":1}"#, "colibri.fmt: expected a string"),
        (r#"{"x":"int9-row"}"#, "tensor x: unknown format \"int9-row\""),
        (r#"{"x":"int8-row","x":"f32"}"#, "tensor x is stamped"),
        (r#"{"x":"int4-rans256-g0"}"#, "an entropy-coded format"),
    ] {
        let message = one_shard_refusal(&stamped("x", stamp), 1);
        assert!(message.contains(expected), "{stamp}: {message}");
    }
    let mut many = String::from("{");
    for number in 0..=4096 {
        let comma = if number > 0 { "," } else { "" };
        write!(many, "{comma}\"t{number}\":\"f32\"").unwrap();
    }
    let message = one_shard_refusal(&stamped("x", &(many + "}")), 1);
    assert!(message.contains("colibri.fmt: more than the allowed 4097 values"), "{message}");
}

#[test]
fn entropy_coded_containers_are_refused_before_their_sizes_confuse() {
    for key in ["cfse", "colibri.int4-rans256-g0.table"] {
        let header = format!(
            r#"{{"x":{{"dtype":"F32","shape":[9],"data_offsets":[0,1]}},
                "__metadata__":{{"{key}":"1"}}}}"#
        );
        let message = one_shard_refusal(&header, 1);
        assert!(message.contains("marks an entropy-coded container"), "{message}");
    }
}

/// The names of a GLM-5.2 container: 75 sparse layers of 256 experts, weights and scales.
fn expert_headers(shards: usize) -> Vec<String> {
    let mut headers = vec![(String::from("{\"__metadata__\":{}"), 0usize); shards];
    let mut count = 0;
    for layer in 3..78 {
        for expert in 0..256 {
            for matrix in ["down", "gate", "up"] {
                for suffix in ["", ".qs"] {
                    let (text, offset) = &mut headers[count * shards / 115_200];
                    write!(
                        text,
                        ",\"model.layers.{layer}.mlp.experts.{expert}.{matrix}_proj.weight{suffix}\
                         \":{{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[{offset},{}]}}",
                        *offset + 1
                    )
                    .unwrap();
                    *offset += 1;
                    count += 1;
                }
            }
        }
    }
    headers.into_iter().map(|(text, _)| text + "}").collect()
}

#[test]
fn index_of_a_full_container_has_every_name() {
    let dir = TempDir::new();
    for (number, header) in expert_headers(12).iter().enumerate() {
        dir.shard(&format!("out-{number:05}.safetensors"), header, 9600);
    }
    let directory = dir.open();
    assert_eq!(directory.len(), 115_200);
    let (last_name, last) = directory.iter().last().unwrap();
    assert_eq!(last_name, "model.layers.77.mlp.experts.255.up_proj.weight.qs");
    assert_eq!((last.shard, directory.get(last_name)), (11, Some(last)));
}
