//! Reads what the compiler made of a kernel and refuses what would move a bit or run from slow memory: flushed or approximate
//! arithmetic, products and sums that the assembler may contract, floating-point atomics, register spills.

/// One thing that is wrong with a compiled program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What rule it breaks.
    pub rule: &'static str,
    /// The offending line.
    pub line: String,
}

/// Faults of the intermediate text.
pub fn ptx_faults(ptx: &str) -> Vec<Fault> {
    ptx.lines()
        .filter_map(|line| instruction_fault(line).map(|rule| Fault { rule, line: line.trim().to_string() }))
        .collect()
}

fn instruction_fault(line: &str) -> Option<&'static str> {
    let code = line.split("//").next().unwrap_or("").trim();
    let code = if let Some(rest) = code.strip_prefix('@') { rest.split_once(' ')?.1.trim() } else { code };
    let opcode = code.split_whitespace().next()?.trim_end_matches(';');
    let mut parts = opcode.split('.');
    let name = parts.next()?;
    let suffixes: Vec<&str> = parts.collect();
    let float = suffixes.iter().any(|s| matches!(*s, "f16" | "f16x2" | "bf16" | "bf16x2" | "f32" | "f32x2" | "f64"));
    if suffixes.contains(&"ftz") {
        return Some("flushes subnormals");
    }
    if suffixes.contains(&"approx") || suffixes.contains(&"full") {
        return Some("approximate");
    }
    let rounded = suffixes.contains(&"rn");
    match name {
        "mul" | "add" | "sub" if float && !rounded => Some("may be contracted"),
        "mad" | "fma" | "div" | "sqrt" | "rcp" if float && !rounded => Some("not correctly rounded"),
        "atom" | "red" if float => Some("floating-point atomic"),
        _ => None,
    }
}

/// Spills in the assembler's report, by kernel.
pub fn spill_faults(log: &str) -> Vec<Fault> {
    let mut kernel = String::new();
    let mut faults = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("entry function '") {
            kernel = rest.split('\'').next().unwrap_or("").to_string();
        }
        let bytes = |what: &str| {
            let (before, _) = line.split_once(what)?;
            before.split_whitespace().last()?.parse::<u64>().ok()
        };
        if bytes(" bytes spill stores").unwrap_or(0) + bytes(" bytes spill loads").unwrap_or(0) > 0 {
            faults.push(Fault { rule: "spills registers", line: format!("{kernel}: {}", line.trim()) });
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(ptx: &str) -> Vec<&'static str> {
        ptx_faults(ptx).into_iter().map(|f| f.rule).collect()
    }

    #[test]
    fn exact_arithmetic_passes() {
        let ptx = "\tfma.rn.f32 %f1, %f2, %f3, %f4;\n\tadd.rn.f32 %f1, %f2, %f3;\n\t@%p1 mul.rn.f32 %f1, %f2, %f3;\n\tdiv.rn.f32 %f1, %f2, %f3;\n\
            \tsqrt.rn.f32 %f1, %f2;\n\tld.shared.v4.f32 {%f1, %f2, %f3, %f4}, [%r1];\n\tadd.s32 %r1, %r2, %r3;\n\tatom.shared.add.u64 %rd1, [%r1], %rd2;\n\
            \tmad.lo.s32 %r1, %r2, %r3, %r4;\n\tcvt.rni.f32.f32 %f1, %f2;\n\tmax.f32 %f1, %f2, %f3;";
        assert_eq!(rules(ptx), Vec::<&str>::new());
    }

    #[test]
    fn each_kind_of_inexact_arithmetic_is_refused() {
        assert_eq!(rules("\tadd.ftz.f32 %f1, %f2, %f3;"), ["flushes subnormals"]);
        assert_eq!(rules("\tex2.approx.f32 %f1, %f2;"), ["approximate"]);
        assert_eq!(rules("\tdiv.full.f32 %f1, %f2, %f3;"), ["approximate"]);
        assert_eq!(rules("\tmul.f32 %f1, %f2, %f3;"), ["may be contracted"]);
        assert_eq!(rules("\t@%p3 add.f32 %f1, %f2, %f3;"), ["may be contracted"]);
        assert_eq!(rules("\tfma.rz.f32 %f1, %f2, %f3, %f4;"), ["not correctly rounded"]);
        assert_eq!(rules("\tatom.global.add.f32 %f1, [%rd1], %f2;"), ["floating-point atomic"]);
        assert_eq!(rules("\tred.global.add.f32 [%rd1], %f2;"), ["floating-point atomic"]);
    }

    #[test]
    fn a_spill_names_its_kernel() {
        let log = "ptxas info    : Compiling entry function 'good' for 'sm_90a'\n    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Compiling entry function 'bad' for 'sm_90a'\n    16 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads\n";
        let faults = spill_faults(log);
        assert_eq!(faults.len(), 1);
        assert!(faults[0].line.starts_with("bad:"));
    }
}
