//! The two fixed reduction trees: 32 values to one by halves, and eight partial results to one.

/// Sums 32 values by halves 16, 8, 4, 2, 1: `a[d] = a[d] + a[d + h]` for d < h.
pub fn tree32(values: &[f32; 32]) -> f32 {
    let mut a = *values;
    for h in [16, 8, 4, 2, 1] {
        for d in 0..h {
            a[d] += a[d + h];
        }
    }
    a[0]
}

/// Combines the eight parts of an attention or RMSNorm sum: ((l0+l4)+(l2+l6)) + ((l1+l5)+(l3+l7)).
pub fn combine_parts(l: &[f32; 8]) -> f32 {
    ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]))
}

/// Combines the eight groups of a linear row: ((g0+g1)+(g2+g3)) + ((g4+g5)+(g6+g7)).
pub fn combine_groups(g: &[f32; 8]) -> f32 {
    ((g[0] + g[1]) + (g[2] + g[3])) + ((g[4] + g[5]) + (g[6] + g[7]))
}

/// Sums 256 parts: tree32 over each run of 32, then `combine_parts`.
pub fn sum_parts(part: &[f32; 256]) -> f32 {
    let mut l = [0.0; 8];
    for (g, l) in l.iter_mut().enumerate() {
        let mut run = [0.0; 32];
        run.copy_from_slice(&part[32 * g..32 * g + 32]);
        *l = tree32(&run);
    }
    combine_parts(&l)
}
