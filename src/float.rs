//! Small floating-point formats to `f32`: bfloat16, IEEE half, FP8 E4M3 and FP4 E2M1.
//!
//! Every conversion here is exact (each value of the small format is an `f32`), so no rounding
//! mode appears. Nothing is ever rounded *to* these formats in this file.

#![forbid(unsafe_code)]

/// bfloat16 bits to `f32`: the upper half of the `f32` with the same value.
pub const fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// IEEE 754 binary16 bits to `f32`, subnormals, infinities and NaN included.
pub const fn f16_to_f32(bits: u16) -> f32 {
    let sign = ((bits & 0x8000) as u32) << 16;
    let exponent = (bits >> 10) & 0x1f;
    let mantissa = (bits & 0x3ff) as u32;
    let magnitude = match exponent {
        // Subnormal: mantissa · 2⁻²⁴, exact in f32.
        0 => (mantissa as f32 * (1.0 / 16_777_216.0)).to_bits(),
        0x1f => 0x7f80_0000 | mantissa << 13,
        _ => (exponent as u32 + 127 - 15) << 23 | mantissa << 13,
    };
    f32::from_bits(sign | magnitude)
}

/// FP8 E4M3 ("fn": finite, NaN only) to `f32`: bias 7, subnormal step 2⁻⁹, largest 448,
/// 0x7F and 0xFF are NaN, there is no infinity.
pub const fn e4m3_to_f32(bits: u8) -> f32 {
    let sign = ((bits & 0x80) as u32) << 24;
    let exponent = (bits >> 3) & 0xf;
    let mantissa = (bits & 7) as u32;
    let magnitude = if bits & 0x7f == 0x7f {
        f32::NAN.to_bits()
    } else if exponent == 0 {
        (mantissa as f32 * (1.0 / 512.0)).to_bits()
    } else {
        (exponent as u32 + 127 - 7) << 23 | mantissa << 20
    };
    f32::from_bits(sign | magnitude)
}

/// [`e4m3_to_f32`] of every byte, for decoding whole rows.
pub static E4M3: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut bits = 0;
    while bits < 256 {
        table[bits] = e4m3_to_f32(bits as u8);
        bits += 1;
    }
    table
};

/// FP4 E2M1 of every code: three magnitude bits, bit 3 is the sign.
pub static E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Little-endian `f32` number `index` of `bytes`.
///
/// Panics when `bytes` holds fewer than `index + 1` floats.
#[inline]
pub fn f32_at(bytes: &[u8], index: usize) -> f32 {
    let chunk = &bytes[index * 4..index * 4 + 4];
    f32::from_le_bytes([chunk[0], chunk[1], chunk[2], chunk[3]])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values from the format definitions: sign · 2^(e−bias) · (1 + m/2^bits).
    #[test]
    fn e4m3_edges_are_the_published_ones() {
        assert_eq!(e4m3_to_f32(0x00), 0.0);
        assert!(e4m3_to_f32(0x80).is_sign_negative());
        assert_eq!(e4m3_to_f32(0x01), 0.001953125);
        assert_eq!(e4m3_to_f32(0x07), 0.013671875);
        assert_eq!(e4m3_to_f32(0x08), 0.015625);
        assert_eq!(e4m3_to_f32(0x38), 1.0);
        assert_eq!(e4m3_to_f32(0xb9), -1.125);
        assert_eq!(e4m3_to_f32(0x7e), 448.0);
        assert!(e4m3_to_f32(0x7f).is_nan() && e4m3_to_f32(0xff).is_nan());
    }

    /// Against the definition in f64 for every pattern, not against the same bit tricks.
    #[test]
    fn f16_equals_its_definition_for_every_pattern() {
        for bits in 0..=u16::MAX {
            let (e, m) = (((bits >> 10) & 31) as i32, (bits & 1023) as f64);
            let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
            let want = match e {
                0 => sign * m * 2f64.powi(-24),
                31 if m == 0.0 => sign * f64::INFINITY,
                31 => f64::NAN,
                _ => sign * (1.0 + m / 1024.0) * 2f64.powi(e - 15),
            };
            let got = f16_to_f32(bits) as f64;
            assert!(got == want || (got.is_nan() && want.is_nan()), "{bits:#06x}: {got} {want}");
        }
    }

    #[test]
    fn bf16_is_the_upper_half() {
        assert_eq!(bf16_to_f32(0x3f80), 1.0);
        assert_eq!(bf16_to_f32(0xc049), -3.140625);
        assert!(bf16_to_f32(0x7fc0).is_nan());
    }
}
