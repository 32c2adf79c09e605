//! The draft head: one more layer behind the last, which predicts the token after the next one.
//!
//! Row p takes the main model's hidden state h of position p, as the output head sees it, and the
//! token of position p + 1:
//!
//! z = [RMSNorm(embedding(token)) | RMSNorm(h)] · Weh_projᵀ; z passes one decoder layer at position
//! p, with a cache, an indexer and experts of its own; u = RMSNorm(z) goes to the output head,
//! whose logits predict the token of position p + 2.
//!
//! To draft further, u takes the place of h and the draft that of the token. The cached row of a
//! position depends on its own inputs alone, not on what attention or the experts give: so known
//! pairs only have to be projected for later rows to see them. Drafts change speed, never a result.
//!
//! While drafts do not pay, the head is not in memory: it takes a place at the end of that of the
//! routed experts when it is needed.

#![forbid(unsafe_code)]

use super::{Model, Pass, Runtime};
use crate::attention::Queries;
use crate::config::Config;
use crate::error::{Context, Result};
use crate::kernels::{Activations, Forms, fit};
use crate::kv::{KvCache, Sequence};
use crate::ops::{Product, rms_norm};
use crate::weights::{MATRIX_ALIGN, Mtp};
use std::sync::Arc;

/// Buffers of one batch.
#[derive(Default)]
pub struct Scratch {
    /// `[T, D]`
    half: Vec<f32>,
    /// `[T, 2D]`
    joined: Vec<f32>,
    input: Activations,
}

impl Scratch {
    /// Bytes at most, for batches of `rows`.
    pub fn bytes(c: &Config, rows: usize) -> usize {
        4 * rows * 3 * c.hidden_size + Activations::bytes(rows, 2 * c.hidden_size)
    }
}

impl Model {
    /// Caches the rows of known pairs from row `first` on: `hidden [T, D]` and the `tokens [T]`
    /// behind them. The head must be there. Where its rows begin behind the start of the text, they
    /// count from there: attention knows distances only.
    pub fn absorb(
        &self,
        tokens: &[u32],
        first: usize,
        hidden: &[f32],
        kv: &mut KvCache,
        runtime: &mut Runtime,
    ) -> Result<()> {
        let head = self.wake_head(runtime)?;
        let batch = &mut [Sequence::new(tokens, first, kv)];
        let pass = self.enter(&head, batch, hidden, runtime)?;
        let Runtime { compute, scratch, .. } = runtime;
        self.project(pass, Queries::None, batch, compute, scratch);
        Ok(())
    }

    /// Row `row` from `hidden [D]` and the token behind it; [`Model::logits`] of row 0 and
    /// [`Model::hidden`] then give what it predicts, and its u. With `keeps_selection` it attends
    /// to the keys that the row before it selected, as some models do within one draft.
    pub fn draft(
        &self,
        token: u32,
        row: usize,
        hidden: &[f32],
        keeps_selection: bool,
        kv: &mut KvCache,
        runtime: &mut Runtime,
    ) -> Result<()> {
        let tokens = [token];
        let head = self.wake_head(runtime)?;
        let batch = &mut [Sequence::new(&tokens, row, kv)];
        let pass = Pass { keeps_selection, ..self.enter(&head, batch, hidden, runtime)? };
        let Runtime { compute, store, scratch, .. } = runtime;
        self.run_layer(pass, batch, (compute, store), scratch, &mut [])?;
        let forms = Forms::of_rows(1).and(self.weights.lm_head.source.format);
        self.norm(compute, 1, &head.final_norm, forms, scratch);
        Ok(())
    }

    /// The draft head, which must be there, in memory that the routed experts then do without.
    pub fn wake_head(&self, runtime: &mut Runtime) -> Result<Arc<Mtp>> {
        if let Some(head) = &runtime.head {
            return Ok(Arc::clone(head));
        }
        let head = self.weights.mtp.as_ref().expect("the model has a draft head");
        let region = runtime.store.lend(head.resident_bytes(), MATRIX_ALIGN)?;
        let head = Arc::new(head.load(&self.directory, region).context(|| "draft head")?);
        Ok(Arc::clone(runtime.head.insert(head)))
    }

    /// x = z of some pairs: the rows of `batch`, one sequence, and their `hidden [T, D]`.
    fn enter<'h>(
        &self,
        head: &'h Mtp,
        batch: &[Sequence<'_>],
        hidden: &[f32],
        runtime: &mut Runtime,
    ) -> Result<Pass<'h>> {
        let rows = batch.iter().flat_map(|s| s.tokens.iter().copied().zip(s.first..));
        let width = self.config.hidden_size;
        let Runtime { compute, scratch, .. } = runtime;
        self.embed(rows.clone(), scratch).context(|| "draft head")?;
        let rows = rows.count();
        let super::Scratch { x, all, stage, mtp: own, .. } = scratch;
        let Scratch { half, joined, input } = own;
        let joined = fit(joined, 2 * rows * width, 0.0);
        let half = fit(half, rows * width, 0.0);
        let parts = [(&x[..rows * width], &head.embedding_norm), (hidden, &head.hidden_norm)];
        for (i, (part, weight)) in parts.into_iter().enumerate() {
            rms_norm(compute, part, weight, self.config.rms_norm_eps, half);
            for (joined, half) in joined.chunks_exact_mut(2 * width).zip(half.chunks_exact(width)) {
                joined[i * width..(i + 1) * width].copy_from_slice(half);
            }
        }
        let forms = Forms::of_rows(rows).and(head.eh_proj.source.format);
        let row = |t: usize| &joined[t * 2 * width..(t + 1) * 2 * width];
        compute.prepare(rows, 2 * width, forms, row, input);
        let (matrix, x) = (head.eh_proj.encoded(), &*input);
        stage.run(compute, 1, |_| Product { matrix, x, tokens: &all[..rows] });
        stage.copy(compute, 0, &mut scratch.x[..rows * width]);
        let (layer, index) = (&head.layer, self.config.num_layers);
        Ok(Pass { layer, index, rows, keeps_selection: false })
    }
}
