// Shared by every kernel: types, the canonical exp, reductions in the canonical order, quantisation of one block.
//
// Compiled with -fmad=false -ftz=false -prec-div=true -prec-sqrt=true: a*b and a+b round once each; fusing is written fma_().
// Definitions: docs/arithmetic.md; oracle: src/arith.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef signed char i8;

#define FULL_MASK 0xffffffffu

__device__ __forceinline__ float fma_(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// f32 of an IEEE half; exact.
__device__ __forceinline__ float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Exact f32 of an integer that was accumulated on top of INT_BIAS; |integer| < 2^22.
#define INT_BIAS 0x4B400000
__device__ __forceinline__ float biased_to_float(int biased) { return __int_as_float(biased) - 12582912.0f; }

// Exact f32 of i8 number `i` of a word; the word was xor-ed with 0x80808080, which makes each byte q + 128.
template <int i>
__device__ __forceinline__ float biased_byte(u32 word) {
    return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7440 + i)) - 8388736.0f;
}

// arith::exp_c.
__device__ __forceinline__ float exp_c(float x) {
    x = fminf(fmaxf(x, -87.0f), 88.0f);
    float n = rintf(x * __uint_as_float(0x3fb8aa3bu));
    float h = fma_(-n, __uint_as_float(0x3f317218u), x);
    float r = fma_(-n, __uint_as_float(0xb102e308u), h);
    float q = fma_(__uint_as_float(0x3ab511f0u), r, __uint_as_float(0x3c091d13u));
    q = fma_(q, r, __uint_as_float(0x3d2aac79u));
    q = fma_(q, r, __uint_as_float(0x3e2aaa48u));
    q = fma_(q, r, __uint_as_float(0x3efffffeu));
    float e = (h + fma_(-n, __uint_as_float(0xb102e308u), q * (r * r))) + 1.0f;
    return e * __int_as_float((__float2int_rn(n) + 127) << 23);
}

__device__ __forceinline__ float swiglu(float g, float u) { return __fdiv_rn(g, 1.0f + exp_c(-g)) * u; }

// Sum over 32 lanes by halves 16, 8, 4, 2, 1. Every lane gets lane 0's bits: addition commutes.
__device__ __forceinline__ float tree32(float v) {
#pragma unroll
    for (int h = 16; h >= 1; h >>= 1) v = v + __shfl_xor_sync(FULL_MASK, v, h);
    return v;
}

// arith::combine_parts.
__device__ __forceinline__ float combine_parts(const float (&l)[8]) {
    return ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
}

__device__ __forceinline__ float max32(float v) {
#pragma unroll
    for (int h = 16; h >= 1; h >>= 1) v = fmaxf(v, __shfl_xor_sync(FULL_MASK, v, h));
    return v;
}

// A warp whose lanes hold one activation block of 32: returns the lane's q, sets d and the exact sum of the block's q in every lane.
// arith::quantise_block. Absolute values order like their bits; fmaxf takes NaN to 0 as the definition's maximum does.
__device__ __forceinline__ int quantise_lane(float v, float& d, int& sum) {
    const float amax = __uint_as_float(__reduce_max_sync(FULL_MASK, __float_as_uint(fmaxf(fabsf(v), 0.0f))));
    const bool zero = amax < __uint_as_float(27u << 23);
    const float inverse = zero ? 0.0f : __fdiv_rn(127.0f, amax);
    d = zero ? 0.0f : __fdiv_rn(amax, 127.0f);
    const int q = max(-127, min(127, __float2int_rn(v * inverse)));
    sum = __reduce_add_sync(FULL_MASK, q);
    return q;
}

// Folds group g's sum into the tree ((g0+g1)+(g2+g3)) + ((g4+g5)+(g6+g7)) as the groups arrive in order; after g = 7, q holds it.
struct GroupTree {
    float a, p, q;
};
__device__ __forceinline__ void group_push(GroupTree& t, int g, float acc) {
    if ((g & 1) == 0) t.a = acc;
    else if (g == 1 || g == 5) t.p = t.a + acc;
    else if (g == 3) t.q = t.p + (t.a + acc);
    else t.q = t.q + (t.p + (t.a + acc));
}

// Order-preserving map of floats to unsigned integers, and back; -0 was removed before.
__device__ __forceinline__ u32 sortable(float v) {
    const u32 bits = __float_as_uint(v);
    return (bits & 0x80000000u) ? ~bits : (bits | 0x80000000u);
}
__device__ __forceinline__ float unsortable(u32 key) {
    return __uint_as_float((key & 0x80000000u) ? (key ^ 0x80000000u) : ~key);
}

// Position `pos` of a sequence inside a KV pool laid out [page][layer][16][kv_dim].
__device__ __forceinline__ size_t kv_offset(const u32* __restrict__ table, u32 pos, int layers, int layer, int kv_dim) {
    return (((size_t)table[pos >> 4] * layers + layer) * 16 + (pos & 15)) * kv_dim;
}
