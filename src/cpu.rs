//! What the processor offers: its vector instructions, and how many cores this process may use.
//!
//! Detection happens once. An instruction set is never assumed: code that needs one takes a token
//! that only detection hands out.

#![forbid(unsafe_code)]

use crate::bail;
use crate::error::{Error, Result};
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// A level of vector instructions. All give the same bits; they differ in speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Plain code for the baseline of the target.
    Scalar,
    /// AVX2, FMA and F16C: 256-bit vectors.
    Avx2,
    /// AVX-512 F, BW, VL, DQ and VNNI: 512-bit vectors with a 16-bit multiply-add.
    Avx512,
}

impl Isa {
    /// Every level, best last.
    pub const ALL: [Isa; 3] = [Isa::Scalar, Isa::Avx2, Isa::Avx512];

    /// The best level of this processor.
    pub fn detect() -> Isa {
        let available = |isa: &&Isa| isa.missing_feature().is_none();
        *Isa::ALL.iter().rev().find(available).expect("scalar code needs nothing")
    }

    /// The first instruction-set extension that this level needs and the processor lacks.
    pub fn missing_feature(self) -> Option<&'static str> {
        #[cfg(target_arch = "x86_64")]
        macro_rules! first_missing {
            ($($feature:tt)*) => {
                [$(($feature, std::arch::is_x86_feature_detected!($feature))),*]
                    .into_iter()
                    .find_map(|(name, present)| (!present).then_some(name))
            };
        }
        #[cfg(target_arch = "x86_64")]
        return match self {
            Isa::Scalar => None,
            Isa::Avx2 => first_missing!("avx2" "fma" "f16c"),
            Isa::Avx512 => first_missing!(
                "avx2" "fma" "f16c" "avx512f" "avx512bw" "avx512vl" "avx512dq" "avx512vnni"
            ),
        };
        #[cfg(not(target_arch = "x86_64"))]
        return (self != Isa::Scalar).then_some("x86-64");
    }

    /// This level, or an error that says what the processor lacks.
    pub fn checked(self) -> Result<Isa> {
        match self.missing_feature() {
            None => Ok(self),
            Some(feature) => bail!("{self} needs {feature}, which this processor lacks"),
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        })
    }
}

impl FromStr for Isa {
    type Err = Error;

    /// `auto` is the best level.
    fn from_str(text: &str) -> Result<Isa> {
        match Isa::ALL.into_iter().find(|isa| isa.to_string() == text) {
            Some(isa) => Ok(isa),
            None if text == "auto" => Ok(Isa::detect()),
            None => bail!("expected auto, scalar, avx2 or avx512, found {text:?}"),
        }
    }
}

/// Threads that compute at full speed: physical cores inside the affinity mask, not more than the
/// cgroup's quota allows. Two hardware threads of one core share the units that bound us.
pub fn default_threads() -> usize {
    allowed_threads().min(usable_cores())
}

/// Distinct cores among the processors that this process may run on; where nothing tells which
/// share a core, as many as it may use at once. At least 1.
pub fn usable_cores() -> usize {
    physical_cores().unwrap_or_else(allowed_threads)
}

/// Affinity and quota are the standard library's business; it knows nothing of siblings.
fn allowed_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn physical_cores() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let siblings = |cpu: usize| {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        std::fs::read_to_string(path).ok()
    };
    let cores: Option<BTreeSet<String>> =
        parse_cpu_list(list.trim())?.into_iter().map(siblings).collect();
    Some(cores?.len()).filter(|cores| *cores > 0)
}

/// Processors of a kernel list such as `0-3,8`; `None` when it is not one.
fn parse_cpu_list(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        // No kernel numbers more processors than this.
        if last > 1 << 16 {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_to_what_they_print() {
        for isa in Isa::ALL {
            assert_eq!(isa.to_string().parse::<Isa>().unwrap(), isa);
        }
        assert_eq!("auto".parse::<Isa>().unwrap(), Isa::detect());
        let error = "sse9".parse::<Isa>().unwrap_err().to_string();
        assert!(error.contains("avx512") && error.contains("sse9"), "{error}");
    }

    #[test]
    fn detection_prefers_the_best_and_never_lacks_scalar() {
        assert_eq!(Isa::Scalar.missing_feature(), None);
        assert_eq!(Isa::detect().missing_feature(), None);
        assert!(Isa::ALL.into_iter().all(|isa| isa <= Isa::detect() || isa.checked().is_err()));
    }

    #[test]
    fn kernel_lists_of_processors_are_understood() {
        assert_eq!(parse_cpu_list("0-2,5"), Some(vec![0, 1, 2, 5]));
        assert_eq!(parse_cpu_list("7"), Some(vec![7]));
        assert_eq!(parse_cpu_list(""), None);
        assert_eq!(parse_cpu_list("0-99999999999"), None);
        assert!(default_threads() >= 1);
    }
}
