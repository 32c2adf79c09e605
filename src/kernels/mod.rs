//! The canonical arithmetic: what every float operation of the engine means, to the bit.
//!
//! Rust neither reorders nor contracts float operations, so writing an order down defines it.
//! [`scalar`] is that definition, in plain code; faster files may exist beside it only if they
//! give the same bits. All the model's arithmetic goes through this module.

#![forbid(unsafe_code)]

pub mod scalar;

pub use scalar::*;
