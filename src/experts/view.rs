//! What the store holds and has done, for other threads to look at while it works. To be looked at
//! costs the store nothing: an expert is one byte, which it alone writes, and what is seen may be
//! half of one change and half of the next. Nothing is decided by it.

#![forbid(unsafe_code)]

use super::{Counters, ExpertId};
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// In memory.
pub const HELD: u8 = 1;
/// Chosen by the last pass through its layer.
pub const CHOSEN: u8 = 2;

/// A view of one store.
#[derive(Default)]
pub struct View {
    counters: Mutex<Counters>,
    /// By layer and expert: [`HELD`] and [`CHOSEN`].
    marks: Vec<Box<[AtomicU8]>>,
}

impl View {
    /// Of a store of so many experts by layer.
    pub fn new(experts: impl IntoIterator<Item = usize>) -> View {
        let layer = |experts| (0..experts).map(|_| AtomicU8::new(0)).collect();
        View { counters: Mutex::default(), marks: experts.into_iter().map(layer).collect() }
    }

    /// What the store had done at the end of the last pass through a layer.
    pub fn counters(&self) -> Counters {
        *self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A digit for each expert of each layer: 1 if it is in memory, and 2 more if the last pass
    /// through the layer chose it. So 2 is one that is being read, or is gone again.
    pub fn layers(&self) -> impl Iterator<Item = String> {
        let digit = |mark: &AtomicU8| char::from(b'0' + mark.load(Relaxed));
        self.marks.iter().map(move |layer| layer.iter().map(digit).collect())
    }

    pub(super) fn count(&self, counters: Counters) {
        *self.counters.lock().unwrap_or_else(PoisonError::into_inner) = counters;
    }

    pub(super) fn choose(&self, layer: usize, chosen: impl Iterator<Item = u32>) {
        let marks = self.marks.get(layer).into_iter().flatten();
        marks.for_each(|mark| mark.store(mark.load(Relaxed) & HELD, Relaxed));
        chosen.for_each(|e| self.change((layer, e as usize), |mark| mark | CHOSEN));
    }

    pub(super) fn hold(&self, id: ExpertId, is_held: bool) {
        self.change(id, |mark| mark & CHOSEN | u8::from(is_held));
    }

    /// Only the store writes, so nothing comes between.
    fn change(&self, (layer, e): ExpertId, change: impl FnOnce(u8) -> u8) {
        if let Some(mark) = self.marks.get(layer).and_then(|layer| layer.get(e)) {
            mark.store(change(mark.load(Relaxed)), Relaxed);
        }
    }
}
