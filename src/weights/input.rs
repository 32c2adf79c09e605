//! What matrices are multiplied with, by name: what a calibration measures, and where the converter
//! looks for it.
//!
//! | input | of |
//! |---|---|
//! | `model.layers.L.self_attn.input` | q_a, kv_a, and the indexer's `wk` and `weights_proj` |
//! | `model.layers.L.mlp.input` | every `gate_proj` and `up_proj` of the layer |
//! | `….down_proj.input` | that `down_proj`, of a dense MLP, the shared experts or one expert |
//! | `lm_head.input` | `lm_head` |
//!
//! The other matrices have inputs too, but knowing those of attention's latents and contexts made
//! no container better that could be measured.

#![forbid(unsafe_code)]

/// A row of activations, within its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Input {
    /// The normed hidden state in front of attention.
    Attention,
    /// The one in front of the MLP, or of the router and all experts.
    Mlp,
    /// What gate and up of a dense layer's MLP give.
    DenseDown,
    /// The same of the shared experts.
    SharedDown,
    /// The same of a routed expert.
    ExpertDown(u32),
    /// The normed hidden state in front of the head; its layer is any.
    Head,
}

impl Input {
    /// Its name in `layer`.
    pub fn name(self, layer: usize) -> String {
        let part = match self {
            Input::Attention => "self_attn".into(),
            Input::Mlp => "mlp".into(),
            Input::DenseDown => "mlp.down_proj".into(),
            Input::SharedDown => "mlp.shared_experts.down_proj".into(),
            Input::ExpertDown(e) => format!("mlp.experts.{e}.down_proj"),
            Input::Head => return "lm_head.input".into(),
        };
        format!("model.layers.{layer}.{part}.input")
    }

    /// The name of the input of a matrix, if it is one of these.
    pub fn name_of(matrix: &str) -> Option<String> {
        let module = matrix.strip_suffix(".weight")?;
        let up_to = |part: &str| Some(&module[..module.find(part)? + part.len()]);
        let place = match module.rsplit('.').next()? {
            "q_a_proj" | "kv_a_proj_with_mqa" | "wk" | "weights_proj" => up_to(".self_attn")?,
            "gate_proj" | "up_proj" => up_to(".mlp")?,
            "down_proj" | "lm_head" => module,
            _ => return None,
        };
        Some(format!("{place}.input"))
    }
}
