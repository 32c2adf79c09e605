//! Calibration: how strong the inputs of matrices are, column by column, so that a search of scales
//! spares the columns that count.
//!
//! The file is safetensors: for each [`Input`] that a text had, by its name, a vector F32 of mean
//! squared activations. What few rows say of a column is drawn towards the mean of all columns, as
//! if 64 further rows had that. Metadata `colibri.calibration` is the shape of the model; a file
//! with another one, or with anything else than such vectors, is refused.

#![forbid(unsafe_code)]

use super::manifest::Hash;
use super::plan::{Entry, header};
use crate::bail;
use crate::config::Config;
use crate::disk::read_exact_at;
use crate::error::{Context, Result};
use crate::safetensors::{CALIBRATION_KEY, Directory, Dtype};
use crate::sys;
use crate::weights::Input;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// Rows that every input is taken to have had beside its own.
const PRIOR_ROWS: f64 = 64.0;

/// What binds a file to models of one shape.
fn shape(c: &Config) -> String {
    format!(
        "vocab_size {}, hidden_size {}, intermediate_size {}, moe_intermediate_size {}, layers {}, \
         experts {}, top_k {}",
        c.vocab_size,
        c.hidden_size,
        c.intermediate_size,
        c.moe_intermediate_size,
        c.num_layers,
        c.n_routed_experts,
        c.top_k
    )
}

/// Squared activations of a text, summed while it runs.
#[derive(Default)]
pub struct Sums {
    /// By layer and input: rows, and a sum for each column.
    inputs: BTreeMap<(usize, Input), (usize, Vec<f64>)>,
}

impl Sums {
    /// Adds one row.
    pub fn add(&mut self, layer: usize, input: Input, x: &[f32]) {
        let (rows, sums) = self.inputs.entry((layer, input)).or_default();
        sums.resize(x.len(), 0.0);
        *rows += 1;
        sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += f64::from(*x) * f64::from(*x));
    }

    /// Writes the file, in one step. Errors name it.
    pub fn write(&self, path: &Path, config: &Config) -> Result<()> {
        let (mut entries, mut data) = (Vec::new(), Vec::new());
        for (i, ((layer, input), (rows, sums))) in self.inputs.iter().enumerate() {
            let (name, bytes, shape) = (input.name(*layer), 4 * sums.len(), vec![sums.len()]);
            entries.push(Entry { dtype: Dtype::F32, name, shape, bytes, tensor: (i, false) });
            let rows = *rows as f64;
            let prior = sums.iter().sum::<f64>() / (rows * sums.len() as f64) * PRIOR_ROWS;
            let mean = |sum: &f64| ((sum + prior) / (rows + PRIOR_ROWS)) as f32;
            data.extend(sums.iter().flat_map(|sum| mean(sum).to_le_bytes()));
        }
        let mut file = header(&entries, Some((CALIBRATION_KEY, shape(config))));
        file.append(&mut data);
        sys::replace_file(path, &file).context(|| path.display())
    }
}

/// A file of [`Sums`], read.
pub struct Calibration {
    /// Mean squared activations, by the name of the input.
    means: HashMap<String, Vec<f32>>,
    hash: Hash,
}

impl Calibration {
    /// Reads the file, which must be of a model like `config`. Errors name it, and the tensor.
    pub fn read(path: &Path, config: &Config) -> Result<Calibration> {
        let directory = Directory::open_files(path, &[path.to_path_buf()])?;
        let wanted = shape(config);
        match directory.calibration() {
            Some(found) if found == wanted => {}
            Some(found) => {
                bail!("{}: made for a model of {found}, not {wanted}", path.display())
            }
            None => bail!("{}: not a calibration: no {CALIBRATION_KEY}", path.display()),
        }
        let (mut means, mut hash) = (HashMap::new(), Hash::START);
        for (name, tensor) in directory.iter() {
            let context = || format!("{}: tensor {name}", path.display());
            if tensor.dtype != Dtype::F32 || tensor.shape.len() != 1 {
                let (dtype, shape) = (tensor.dtype.name(), &tensor.shape);
                bail!("{}: expected a vector F32, found {dtype} {shape:?}", context());
            }
            let mut bytes = vec![0; tensor.bytes as usize];
            read_exact_at(&directory.shard(tensor).file, path, name, tensor.offset, &mut bytes)?;
            hash.add(name.as_bytes());
            hash.add(&bytes);
            let words = bytes.as_chunks::<4>().0.iter();
            let values: Vec<f32> = words.map(|word| f32::from_le_bytes(*word)).collect();
            let is_mean = |value: &f32| value.is_finite() && *value >= 0.0;
            if let Some(column) = values.iter().position(|value| !is_mean(value)) {
                bail!("{}: column {column}: {} is no mean of squares", context(), values[column]);
            }
            means.insert(name.to_string(), values);
        }
        Ok(Calibration { means, hash })
    }

    /// What each of the `cols` columns of a matrix counts for; `None` where no row of the input
    /// was seen. Error: it has another number of columns.
    pub fn importance(&self, matrix: &str, cols: usize) -> Result<Option<&[f32]>> {
        let input = Input::name_of(matrix);
        let Some((name, means)) = input.and_then(|name| self.means.get_key_value(&name)) else {
            return Ok(None);
        };
        if means.len() != cols {
            bail!("calibration {name}: expected {cols} columns, found {}", means.len());
        }
        Ok(Some(means))
    }

    /// Differs for other contents.
    pub fn hash(&self) -> u64 {
        self.hash.0
    }
}
