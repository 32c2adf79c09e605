//! Element types of safetensors files: every name the format defines, and what it costs.

#![forbid(unsafe_code)]

/// Declares the enum and its one table: variant, bits per element, canonical name, other spellings.
macro_rules! dtypes {
    ($($variant:ident $bits:literal $name:literal $(| $alias:literal)*;)*) => {
        /// The element type of a stored tensor.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(missing_docs)] // The names are the format's own.
        pub enum Dtype { $($variant),* }

        impl Dtype {
            /// The type a header's `dtype` string names.
            pub fn parse(name: &str) -> Option<Dtype> {
                match name {
                    $($name $(| $alias)* => Some(Dtype::$variant),)*
                    _ => None,
                }
            }

            /// The canonical name, as headers spell it.
            pub fn name(self) -> &'static str {
                match self { $(Dtype::$variant => $name),* }
            }

            /// Bits per element; only the packed `F4` and `F6` types are no whole number of bytes.
            pub fn size_bits(self) -> u64 {
                match self { $(Dtype::$variant => $bits),* }
            }
        }
    };
}

dtypes! {
    F64 64 "F64";
    F32 32 "F32";
    F16 16 "F16";
    Bf16 16 "BF16";
    F8E4m3 8 "F8_E4M3" | "F8_E4M3FN" | "float8_e4m3fn";
    F8E4m3Fnuz 8 "F8_E4M3FNUZ";
    F8E5m2 8 "F8_E5M2";
    F8E5m2Fnuz 8 "F8_E5M2FNUZ";
    F8E8m0 8 "F8_E8M0" | "F8_E8M0FNU";
    F6E2m3 6 "F6_E2M3";
    F6E3m2 6 "F6_E3M2";
    F4 4 "F4";
    C64 64 "C64";
    U64 64 "U64";
    I64 64 "I64";
    U32 32 "U32";
    I32 32 "I32";
    U16 16 "U16";
    I16 16 "I16";
    U8 8 "U8";
    I8 8 "I8";
    Bool 8 "BOOL";
}

impl Dtype {
    /// Bytes per element, rounded up for the packed `F4` and `F6` types.
    pub fn size_bytes(self) -> u64 {
        self.size_bits().div_ceil(8)
    }
}
