//! What several test files share: fixtures and raw float files.

#![allow(dead_code, reason = "each test binary uses a part of this file")]

use colibri::config::{Config, IndexerKind, MlpKind};
use colibri::engine::{Engine, Options};
use colibri::json::{self, Limits, Value};
use colibri::model::Observer;
use std::path::{Path, PathBuf};

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
