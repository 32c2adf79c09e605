//! What several test files share: fixtures, raw float files, random inputs.

#![allow(dead_code, reason = "each test binary uses a part of this file")]

pub mod serve;

use colibri::config::{Config, IndexerKind, MlpKind};
use colibri::engine::{Engine, Options};
use colibri::json::{self, Limits, Value};
use colibri::model::Observer;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The directory `tests/fixtures/NAME`.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// A JSON file.
pub fn read_json(path: &Path) -> Value {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    json::parse(&bytes, Limits::default()).unwrap()
}

/// A file of raw little-endian `f32`.
pub fn read_floats(path: &Path) -> Vec<f32> {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// The integers of a JSON array.
pub fn integers(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

/// The tokens of a fixture's reference.
pub fn full_ids(name: &str) -> Vec<u32> {
    integers(read_json(&fixture(name).join("ref.json")).get("full_ids").unwrap())
}

/// FNV-1a64 of the little-endian logits `[T, V]` of `full_ids`, per fixture: what the canonical
/// arithmetic gives. To change one is to change the output of every model: a deliberate act, with
/// its reason in the commit. `cargo test --test bits` prints the hashes that differ as lines of
/// this table; `coli logits --ref ref.json` prints the same hash.
pub const GOLDEN: [(&str, u64); 23] = [
    ("a_seed", 0x32ef_e728_e7d4_bd0b),
    ("b_dsa_full", 0x437f_3b4a_1a4b_bb30),
    ("c_shared", 0x4ab4_554d_ac62_400b),
    ("d_groups_norm", 0xbb86_5b00_99ce_5b77),
    ("e_odd_untied", 0x39b5_e413_e96e_210c),
    ("g_bf16_sharded", 0x1ff9_17eb_ad06_5e13),
    ("h_mtp", 0xbec3_d436_1e94_321f),
    ("i_tied_bias", 0x832c_d017_8ddd_61d8),
    ("j_legacy", 0x5ef1_29aa_2934_a89e),
    ("k_long", 0xb5f3_f292_faec_bf3d),
    ("l_f16", 0x26a6_deb0_5b3e_87c9),
    ("formats/fp8-block", 0x9f51_6e46_d7fa_1c0a),
    ("formats/hf-bf16", 0x4f8b_a07a_a4ea_3958),
    ("formats/hf-fp8", 0xcf5a_35b8_c96a_79b4),
    ("formats/hf-nvfp4", 0x9599_399d_00da_3345),
    ("formats/int2-row", 0x65ed_c736_bae8_e4d1),
    ("formats/int3-g64", 0xf5ca_e3af_f514_b4a5),
    ("formats/int4-g16", 0x5741_fce4_c853_6a74),
    ("formats/int4-g32", 0x19b7_6b19_260e_7448),
    ("formats/int4-g64", 0x7614_962c_b15a_c388),
    ("formats/int4-row", 0x72b2_4711_1ef7_598e),
    ("formats/int8-row", 0x4243_8fd0_37ee_4f14),
    ("formats/mixed", 0x8f15_b905_0e43_40cc),
];

/// Where a hash starts.
pub const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;

/// Continues a hash; starts at [`FNV_OFFSET`].
pub fn fnv1a64(hash: u64, floats: &[f32]) -> u64 {
    let bytes = floats.iter().flat_map(|float| float.to_le_bytes());
    bytes.fold(hash, |hash, byte| (hash ^ byte as u64).wrapping_mul(0x0000_0100_0000_01b3))
}

/// An empty directory of its own for one test, removed when dropped.
pub struct TempDir(pub PathBuf);

impl TempDir {
    /// `name` must be unique within the test binary.
    pub fn new(name: &str) -> TempDir {
        let path = std::env::temp_dir().join(format!("colibri-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        TempDir(path)
    }

    /// Copies the files of a fixture into it.
    pub fn with_fixture(name: &str, fixture_name: &str) -> TempDir {
        let dir = TempDir::new(name);
        for entry in std::fs::read_dir(fixture(fixture_name)).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), dir.0.join(entry.file_name())).unwrap();
        }
        dir
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Checks what the model decides against `trace.json`, and counts what it saw.
pub struct Trace {
    router: Vec<Value>,
    kept: Vec<Value>,
    /// Positions whose keys are recorded; `None` for all of them.
    kept_positions: Option<Vec<u32>>,
    sparse_layers: Vec<usize>,
    index_layers: Vec<usize>,
    routed: usize,
    selected: usize,
}

impl Trace {
    /// The trace of the fixture in `dir`, whose configuration is `config`.
    pub fn read(dir: &Path, config: &Config) -> Trace {
        let trace = read_json(&dir.join("trace.json"));
        let list = |key: &str| {
            trace.get(key).and_then(Value::as_array).map(<[Value]>::to_vec).unwrap_or_default()
        };
        let layers =
            |is: &dyn Fn(usize) -> bool| (0..config.num_layers).filter(|l| is(*l)).collect();
        let positions = trace.get("indexer_positions").filter(|p| p.as_array().is_some());
        Trace {
            router: list("router"),
            kept: list("indexer_selected"),
            kept_positions: positions.map(integers),
            sparse_layers: layers(&|l| config.mlp[l] == MlpKind::Sparse),
            index_layers: layers(&|l| config.indexer[l] == IndexerKind::Full),
            routed: 0,
            selected: 0,
        }
    }

    /// Fails unless every choice of a run over `tokens` positions was looked at.
    pub fn assert_complete(&self, tokens: usize) {
        assert_eq!(self.routed, self.sparse_layers.len() * tokens, "routes seen");
        let recorded: usize = self.kept.iter().map(|layer| layer.as_array().unwrap().len()).sum();
        assert_eq!(self.selected, recorded, "selections seen");
    }
}

impl Observer for Trace {
    fn routed(&mut self, layer: usize, position: usize, route: &[(u32, f32)]) {
        let j = self.sparse_layers.iter().position(|l| *l == layer).unwrap();
        let mut want = integers(&self.router[j].as_array().unwrap()[position]);
        want.sort_unstable();
        let got: Vec<u32> = route.iter().map(|(e, _)| *e).collect();
        assert_eq!(got, want, "experts of layer {layer}, position {position}");
        self.routed += 1;
    }

    fn kept(&mut self, layer: usize, position: usize, keys: Option<&[u32]>) {
        let row = match &self.kept_positions {
            Some(positions) => positions.iter().position(|p| *p as usize == position),
            None => Some(position),
        };
        let Some(row) = row.filter(|_| !self.kept.is_empty()) else { return };
        let j = self.index_layers.iter().position(|l| *l == layer).unwrap();
        let mut want = integers(&self.kept[j].as_array().unwrap()[row]);
        want.sort_unstable();
        let all: Vec<u32> = (0..=position as u32).collect();
        assert_eq!(keys.unwrap_or(&all), want, "keys of layer {layer}, position {position}");
        self.selected += 1;
    }
}

/// Opens a model without showing progress.
pub fn open(dir: &Path, options: Options) -> Engine {
    Engine::open(dir, options, |_, _| {}).unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
}

/// All logits of `tokens`.
pub fn all_logits(engine: &Engine, tokens: &[u32], observer: &mut dyn Observer) -> Vec<f32> {
    let mut all = Vec::new();
    let sink = |logits: &[f32]| {
        all.extend_from_slice(logits);
        Ok(())
    };
    engine.session().unwrap().logits_of_all(tokens, observer, sink).unwrap();
    all
}

/// Largest and root-mean-square difference.
pub fn difference(got: &[f32], want: &[f32]) -> (f64, f64) {
    assert_eq!(got.len(), want.len());
    let deltas = got.iter().zip(want).map(|(a, b)| (*a as f64 - *b as f64).abs());
    let (max, sum) = deltas.fold((0.0f64, 0.0), |(max, sum), d| (max.max(d), sum + d * d));
    (max, (sum / got.len() as f64).sqrt())
}

/// One tensor of a file that a test writes.
pub struct TestTensor {
    /// Name.
    pub name: String,
    /// Dtype as written in the header.
    pub dtype: &'static str,
    /// Shape.
    pub shape: Vec<usize>,
    /// Payload.
    pub bytes: Vec<u8>,
}

/// Writes a safetensors file whose payloads follow each other in the given order.
pub fn write_safetensors(path: &Path, tensors: &[TestTensor]) {
    let mut header = String::from("{");
    let mut offset = 0;
    for (i, tensor) in tensors.iter().enumerate() {
        let (name, dtype, shape) = (&tensor.name, tensor.dtype, &tensor.shape);
        let end = offset + tensor.bytes.len();
        let comma = if i == 0 { "" } else { "," };
        header += &format!(
            "{comma}\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\
             \"data_offsets\":[{offset},{end}]}}"
        );
        offset = end;
    }
    header += "}";
    let padded = header.len().next_multiple_of(8);
    header += &" ".repeat(padded - header.len());
    let mut bytes = (padded as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    tensors.iter().for_each(|tensor| bytes.extend(&tensor.bytes));
    std::fs::write(path, bytes).unwrap();
}

/// The tensors of a safetensors file, in the order of their payloads.
pub fn read_safetensors(path: &Path) -> Vec<TestTensor> {
    let bytes = std::fs::read(path).unwrap();
    let header_bytes = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = json::parse(&bytes[8..8 + header_bytes], Limits::default()).unwrap();
    let mut tensors = Vec::new();
    for (name, entry) in header.as_object().unwrap() {
        if name == "__metadata__" {
            continue;
        }
        let offsets = integers(entry.get("data_offsets").unwrap());
        let payload = &bytes[8 + header_bytes..][offsets[0] as usize..offsets[1] as usize];
        let dtype = match entry.get("dtype").unwrap().as_str().unwrap() {
            "F32" => "F32",
            "BF16" => "BF16",
            "F16" => "F16",
            "U8" => "U8",
            other => panic!("dtype {other} in a fixture"),
        };
        let shape = integers(entry.get("shape").unwrap()).iter().map(|n| *n as usize).collect();
        let tensor = TestTensor { name: name.clone(), dtype, shape, bytes: payload.to_vec() };
        tensors.push((offsets[0], tensor));
    }
    tensors.sort_by_key(|(offset, _)| *offset);
    tensors.into_iter().map(|(_, tensor)| tensor).collect()
}

/// Longest any one fuzz case may take, on a busy machine; the inputs are a few kilobytes.
const CASE_TIME_MAX: Duration = Duration::from_secs(2);

/// Most memory the process may have used at any time; all the inputs together are far smaller.
const PEAK_KIB_MAX: u64 = 400 << 10;

/// Marsaglia's xorshift64*.
pub struct Random(u64);

impl Random {
    /// Any seed will do; zero is the generator's fixed point.
    pub fn new(seed: u64) -> Random {
        Random(seed | 1)
    }

    /// 64 bits.
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// Uniform enough in 0..end; `end` is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        ((self.next() >> 33) % end as u64) as usize
    }

    /// One of the choices.
    pub fn pick<'a, T: ?Sized>(&mut self, choices: &[&'a T]) -> &'a T {
        choices[self.below(choices.len())]
    }
}

/// `COLI_FUZZ_SEED`, or the time.
pub fn new_seed() -> u64 {
    let given = std::env::var("COLI_FUZZ_SEED").ok().and_then(|text| text.parse().ok());
    given.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        now.as_nanos() as u64
    })
}

/// Runs `check` on `count` inputs that `make` draws. A case that panics or takes too long fails
/// with its seed, number and input.
pub fn fuzz(
    name: &str,
    count: usize,
    mut make: impl FnMut(&mut Random) -> Vec<u8>,
    mut check: impl FnMut(&[u8]),
) {
    let seed = new_seed();
    println!("{name}: COLI_FUZZ_SEED={seed}");
    let mut random = Random::new(seed);
    for case in 0..count {
        let input = make(&mut random);
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| check(&input)));
        let elapsed = start.elapsed();
        if outcome.is_err() || elapsed > CASE_TIME_MAX {
            let what = if outcome.is_err() { "panicked" } else { "was slow" };
            let input = String::from_utf8_lossy(&input);
            panic!("{name}: seed {seed}, case {case} {what} after {elapsed:?} on:\n{input:?}");
        }
    }
    assert_peak_memory(name, seed);
}

/// Checks the process's peak memory where the system tells it.
fn assert_peak_memory(name: &str, seed: u64) {
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else { return };
    let Some(line) = status.lines().find(|line| line.starts_with("VmHWM:")) else { return };
    let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(kib < PEAK_KIB_MAX, "{name}: seed {seed}: peak of {kib} KiB");
}
