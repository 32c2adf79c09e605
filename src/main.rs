//! The `coli` command.

fn main() {}
