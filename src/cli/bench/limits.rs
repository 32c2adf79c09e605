//! The limits of this machine, measured with the threads and instructions of the engine.

#![forbid(unsafe_code)]

use crate::error::Result;
use crate::kernels::limits::{MultiplyAdd16, MultiplyAdd32, Read};
use crate::ops::Compute;
use crate::sys::Pages;
use std::hint::black_box;
use std::time::Instant;

/// Memory that is streamed; far more than any cache holds.
const READ_BYTES: usize = 512 << 20;
/// Part of it that a thread takes at a time.
const PART_BYTES: usize = 1 << 20;
/// Distances ahead that are tried; the best one counts.
const AHEAD_BYTES: [usize; 3] = [4096, 8192, 16384];
/// Repetitions of a register loop: a few milliseconds.
const STEPS: usize = 1 << 20;

/// What measures them: memory to stream through.
pub struct Limits {
    pages: Pages,
    cuts: Vec<usize>,
}

impl Limits {
    /// Reserves the memory and touches all of it.
    pub fn new() -> Result<Limits> {
        let mut pages = Pages::new(READ_BYTES)?;
        pages.fill(1);
        let cuts = (0..=READ_BYTES / PART_BYTES).map(|i| i * PART_BYTES).collect();
        Ok(Limits { pages, cuts })
    }

    /// Of all threads together: gigabytes a second that they read, 10⁹ 16-bit multiply-adds, and
    /// 10⁹ single-precision operations.
    pub fn measure(&mut self, compute: &mut Compute) -> [f64; 3] {
        let arithmetic = compute.arithmetic;
        let int16_gmacs = on_all_threads(compute, MultiplyAdd16::MACS, |steps| {
            black_box(arithmetic.run(MultiplyAdd16 { steps }));
        });
        let f32_gflops = on_all_threads(compute, MultiplyAdd32::FLOPS, |steps| {
            black_box(arithmetic.run(MultiplyAdd32 { steps }));
        });
        [self.read_gbs(compute), int16_gmacs, f32_gflops]
    }

    fn read_gbs(&mut self, compute: &mut Compute) -> f64 {
        let Limits { pages, cuts } = self;
        let best = AHEAD_BYTES.into_iter().map(|ahead_bytes| {
            let arithmetic = compute.arithmetic;
            let start = Instant::now();
            compute.pool.for_each_part(pages, cuts, &mut compute.scratch, |_, bytes, _| {
                black_box(arithmetic.run(Read { bytes, ahead_bytes }));
            });
            start.elapsed().as_secs_f64()
        });
        READ_BYTES as f64 / 1e9 / best.fold(f64::INFINITY, f64::min)
    }
}

fn on_all_threads(compute: &mut Compute, per_step: usize, f: impl Fn(usize) + Sync) -> f64 {
    // Several parts a thread, so that one that is late does less.
    let parts = 8 * compute.pool.threads();
    let (mut data, cuts) = (vec![(); parts], (0..=parts).collect::<Vec<_>>());
    let start = Instant::now();
    compute.pool.for_each_part(&mut data, &cuts, &mut compute.scratch, |_, _, _| f(STEPS / 8));
    let steps = parts * (STEPS / 8);
    (steps * per_step) as f64 / 1e9 / start.elapsed().as_secs_f64()
}
