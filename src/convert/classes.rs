//! What kind of weight a tensor is, by its name: which file it goes to, and whose format it gets.

#![forbid(unsafe_code)]

use crate::bail;
use crate::error::Result;
use crate::quant::{Format, INT4_GROUPS};

/// The three families of output files: a container without the last two is complete, only slower.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// `out-NNNNN`, one for every source shard.
    Main,
    /// `out-mtp-NNNNN`: the draft head, layer `num_hidden_layers`.
    Mtp,
    /// `out-idx-NNNNN`: the sparse-attention indexer of the main layers.
    Index,
}

impl Part {
    /// Name of the `number`th file.
    pub fn file_name(self, number: usize) -> String {
        let prefix = match self {
            Part::Main => "out-",
            Part::Mtp => "out-mtp-",
            Part::Index => "out-idx-",
        };
        format!("{prefix}{number:05}.safetensors")
    }

    /// The family of a file that [`Part::file_name`] named.
    pub fn of_file(name: &str) -> Part {
        match name {
            _ if name.starts_with("out-mtp-") => Part::Mtp,
            _ if name.starts_with("out-idx-") => Part::Index,
            _ => Part::Main,
        }
    }
}

/// Declares the enum and its one table: variant, name, what it holds.
macro_rules! classes {
    ($($variant:ident $name:literal $what:literal;)*) => {
        /// Tensors that share one output format.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Class { $(#[doc = $what] $variant),* }

        impl Class {
            /// All of them, in the order of a plan.
            pub const ALL: [Class; [$($name),*].len()] = [$(Class::$variant),*];

            /// As flags and plans call it.
            pub const fn name(self) -> &'static str {
                match self { $(Class::$variant => $name),* }
            }
        }
    };
}

classes! {
    Experts "experts" "Routed experts of the main layers.";
    Attention "attention" "q_a, q_b and kv_a.";
    OProj "o-proj" "Output projection of attention.";
    KvB "kv-b" "Keys and values out of their latent.";
    Dense "dense" "MLP of a layer without experts.";
    Shared "shared" "Shared experts.";
    Io "io" "Embedding and head.";
    Indexer "indexer" "Matrices of the indexers, the draft head's too.";
    Mtp "mtp" "Matrices of the draft head, but for its routed experts.";
    MtpExperts "mtp-experts" "Routed experts of the draft head.";
    Plain "plain" "Norms, routers and biases: always F32.";
}

impl Class {
    /// The class, earlier in the list, whose format it has unless told otherwise.
    pub fn model(self) -> Option<Class> {
        match self {
            Class::OProj | Class::KvB => Some(Class::Attention),
            Class::MtpExperts => Some(Class::Mtp),
            _ => None,
        }
    }
}

/// The output format of every class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Formats([Format; Class::ALL.len()]);

impl Default for Formats {
    /// Experts int4 with a scale per 64 columns, the rest int8: so the draft head keeps the eight
    /// bits without which its drafts are wrong.
    fn default() -> Formats {
        let mut formats = Formats([Format::Int8Row; Class::ALL.len()]);
        formats.set(Class::Experts, Format::Int4Group(64));
        formats.set(Class::Plain, Format::F32);
        formats
    }
}

impl Formats {
    /// That of one class.
    pub fn of(&self, class: Class) -> Format {
        self.0[class as usize]
    }

    /// Changes one.
    pub fn set(&mut self, class: Class, format: Format) {
        self.0[class as usize] = format;
    }
}

/// A format that can be asked for: `int8`, `int4`, `int4-g64` (16 to 256), `int3`, or `fp8`, which
/// leaves FP8 and plain floats as the source has them. Full names (`int8-row`) do as well.
pub fn parse_format(text: &str) -> Result<Format> {
    let groups = INT4_GROUPS.into_iter().map(Format::Int4Group);
    let formats =
        [Format::Int8Row, Format::Int4Row, Format::Int3Group64, Format::Fp8Block].into_iter();
    let full = formats.chain(groups).find(|format| format.to_string() == text);
    match (full, text) {
        (Some(format), _) => Ok(format),
        (_, "int8") => Ok(Format::Int8Row),
        (_, "int4") => Ok(Format::Int4Row),
        (_, "int3") => Ok(Format::Int3Group64),
        (_, "fp8") => Ok(Format::Fp8Block),
        _ => bail!("expected int8, int4, int4-g16 to int4-g256, int3 or fp8, found {text:?}"),
    }
}

/// Sidecars: read with the weight they belong to, or not at all.
const SIDECARS: [&str; 4] = ["_scale_inv", ".weight_scale", ".weight_scale_2", ".input_scale"];

/// Where a tensor of `rank` dimensions goes, in a model of `layers` main layers. `None`: nowhere,
/// because it is a sidecar, or of a layer that no engine reads, or the draft head's copy of a
/// matrix that it shares with the main model.
pub fn classify(name: &str, rank: usize, layers: usize) -> Option<(Part, Class)> {
    if SIDECARS.iter().any(|end| name.ends_with(end)) {
        return None;
    }
    let numbered = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    let layer = numbered.and_then(|(number, _)| number.parse::<usize>().ok());
    let is_index = name.contains(".indexer.");
    let part = match layer {
        Some(layer) if layer > layers => return None,
        Some(layer) if layer == layers => Part::Mtp,
        _ if is_index => Part::Index,
        _ => Part::Main,
    };
    let ends = |ends: &[&str]| ends.iter().any(|end| name.ends_with(end));
    if part == Part::Mtp && ends(&[".embed_tokens.weight", ".shared_head.head.weight"]) {
        return None;
    }
    let class = if rank != 2 || ends(&["norm.weight", ".mlp.gate.weight"]) || !ends(&[".weight"]) {
        Class::Plain
    } else if is_index {
        Class::Indexer
    } else if part == Part::Mtp {
        if name.contains(".mlp.experts.") { Class::MtpExperts } else { Class::Mtp }
    } else if ends(&["embed_tokens.weight", "lm_head.weight"]) {
        Class::Io
    } else if name.contains(".mlp.experts.") {
        Class::Experts
    } else if name.contains(".mlp.shared_experts.") {
        Class::Shared
    } else if name.contains(".mlp.") {
        Class::Dense
    } else if ends(&[".o_proj.weight"]) {
        Class::OProj
    } else if ends(&[".kv_b_proj.weight"]) {
        Class::KvB
    } else {
        Class::Attention
    };
    Some((part, class))
}
