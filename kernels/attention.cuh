// Arguments shared by the two attention kernels and the canonical score. HEAD_DIM is a macro: 32, 64, 96 or 128.
//
// Segments of `segment` positions are anchored at position 0. K and V live in pools [page][layer][16][kv_dim]; every page is translated
// through the slot's table. Queries are rows of qkv [q_dim + 2 kv_dim]. Oracle: arith::attend.
#pragma once
#include "linear.cuh"

#define D HEAD_DIM

struct AttendArgs {
    const float* qkv;
    float* out;                          // [token rows][q_dim]
    i8* oq;                              // decode: the same, quantised, with scales [token rows][q_dim/32]; null: out
    float *oda, *osa;
    const u32 *tok_slot, *tok_pos, *tables;
    float *k_pool, *v_pool;
    const float2* angles;                // [context][D/2] cos, sin (fused decode)
    float* partial;                      // decode: [entry][heads][max_segments][D + 2] of m, l, o
    u32* counters;                       // decode: [entry][grid.x], zero between launches
    const u32* entries;                  // decode: token rows, null: entry i is token row i; prefill: (first token row, rows) a tile
    int heads, kv_heads, layers, layer, table_stride, segment, max_segments, adjacent, capacity;
    int block_heads;                     // decode: query heads of a block at least; HEADS at most
    int room;                            // decode: blocks that the device holds at once
    float scale;
};

template <int H>
__device__ __forceinline__ void halve(float (&a)[32]) {
#pragma unroll
    for (int d = 0; d < H; ++d) a[d] = a[d] + a[d + H];
}

// 32 chains over d, d+32, ...; halves 16..1; times the scale. q in shared memory, k in registers.
__device__ __forceinline__ float score(const float* __restrict__ q, const float (&k)[D], float scale) {
    float a[32];
#pragma unroll
    for (int c = 0; c < D / 32; ++c)
#pragma unroll
        for (int d = 0; d < 32; d += 4) {
            const float4 v = *reinterpret_cast<const float4*>(q + 32 * c + d);
            const float* kk = k + 32 * c + d;
            a[d] = c == 0 ? v.x * kk[0] : fma_(v.x, kk[0], a[d]);
            a[d + 1] = c == 0 ? v.y * kk[1] : fma_(v.y, kk[1], a[d + 1]);
            a[d + 2] = c == 0 ? v.z * kk[2] : fma_(v.z, kk[2], a[d + 2]);
            a[d + 3] = c == 0 ? v.w * kk[3] : fma_(v.w, kk[3], a[d + 3]);
        }
    halve<16>(a);
    halve<8>(a);
    halve<4>(a);
    halve<2>(a);
    return (a[0] + a[1]) * scale;
}

__device__ __forceinline__ void load_head(const float* __restrict__ from, float (&k)[D]) {
#pragma unroll
    for (int d = 0; d < D; d += 4) {
        const float4 v = *reinterpret_cast<const float4*>(from + d);
        k[d] = v.x, k[d + 1] = v.y, k[d + 2] = v.z, k[d + 3] = v.w;
    }
}
