// Attention of runs of positions of one sequence: tiles of ROWS adjacent query rows times HEADS heads of one KV head share its history.
//
// rope_kv has run. Grid: (kv_heads * ceil(group/HEADS), tiles). Block: 128 threads; a warp owns a quarter of the tile's ROWS*HEADS
// distributions from the softmax on. Scores: one thread a key, the key in registers, queries broadcast from shared memory: no shuffle.
// Values: D/32 components a lane, each value row read once for all of a warp's distributions.
// Shared memory, dynamic: ROWS*HEADS*(D + capacity) floats, capacity = min(segment, history rounded up to 256).
// entries: per tile the first token row and the number of rows.
#include "attention.cuh"

extern __shared__ __align__(16) float shared[];

// D/32 neighbouring components of a value row.
__device__ __forceinline__ void load_wide(const float* __restrict__ from, float (&v)[D / 32]) {
#if HEAD_DIM == 64
    const float2 t = *reinterpret_cast<const float2*>(from);
    v[0] = t.x, v[1] = t.y;
#elif HEAD_DIM == 128
    const float4 t = *reinterpret_cast<const float4*>(from);
    v[0] = t.x, v[1] = t.y, v[2] = t.z, v[3] = t.w;
#else
#pragma unroll
    for (int d = 0; d < D / 32; ++d) v[d] = from[d];
#endif
}

template <int ROWS, int HEADS>
__device__ __forceinline__ void attend_prefill(const AttendArgs& a) {
    constexpr int DISTS = ROWS * HEADS, PER_WARP = DISTS / 4, WIDE = D / 32;
    float* q = shared;
    float* scores = q + DISTS * D;
    __shared__ float running_m[DISTS], running_l[DISTS], factor_a[DISTS], factor_b[DISTS];
    grid_wait();
    const int group = a.heads / a.kv_heads, chunks = (group + HEADS - 1) / HEADS, chunk = blockIdx.x % chunks;
    const int kv_head = blockIdx.x / chunks, head0 = kv_head * group + chunk * HEADS, heads = min(HEADS, group - chunk * HEADS);
    const int token0 = a.entries[2 * blockIdx.y], rows = a.entries[2 * blockIdx.y + 1];
    const int kv_dim = a.kv_heads * D, stride = a.heads * D + 2 * kv_dim;
    const u32* table = a.tables + (size_t)a.tok_slot[token0] * a.table_stride;
    const int pos0 = a.tok_pos[token0], pos_last = pos0 + rows - 1;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    for (int i = threadIdx.x; i < DISTS * D; i += 128) {
        const int dist = i / D, row = dist / HEADS, head = dist % HEADS;
        q[i] = row < rows && head < heads ? a.qkv[(size_t)(token0 + row) * stride + (head0 + head) * D + i % D] : 0.0f;
    }
    __syncthreads();
    float total[PER_WARP][WIDE];
#pragma unroll
    for (int i = 0; i < PER_WARP; ++i)
#pragma unroll
        for (int d = 0; d < WIDE; ++d) total[i][d] = 0.0f;

    for (int s = 0; s <= pos_last / a.segment; ++s) {
        const int first = s * a.segment, last = min(first + a.segment - 1, pos_last);
        for (int j = first + threadIdx.x; j <= last; j += 128) {
            float k[D];
            load_head(a.k_pool + kv_offset(table, j, a.layers, a.layer, kv_dim) + kv_head * D, k);
            const int row_from = max(0, j - pos0);
            for (int row = row_from; row < rows; ++row)
#pragma unroll 1
                for (int head = 0; head < heads; ++head) {
                    const int dist = row * HEADS + head;
                    scores[dist * a.capacity + j - first] = score(q + dist * D, k, a.scale);
                }
        }
        __syncthreads();
        int n_min = a.segment, n_max = 0;
#pragma unroll 1
        for (int i = 0; i < PER_WARP; ++i) {
            const int dist = warp * PER_WARP + i, row = dist / HEADS;
            const int n = row < rows && dist % HEADS < heads ? max(0, min(last, pos0 + row) - first + 1) : 0;
            if (row < rows) n_min = min(n_min, max(0, min(last, pos0 + row) - first + 1));
            n_max = max(n_max, n);
            if (n == 0) continue;
            float* x = scores + dist * a.capacity;
            float m = -3.402823466e38f;
            for (int t = lane; t < n; t += 32) m = fmaxf(m, x[t]);
            m = max32(m);
            float part[8];
#pragma unroll
            for (int g = 0; g < 8; ++g) part[g] = 0.0f;
            for (int base = 0; base < n; base += 256)
#pragma unroll
                for (int g = 0; g < 8; ++g) {
                    const int t = base + 32 * g + lane;
                    if (t < n) {
                        const float w = exp_c(x[t] - m);
                        x[t] = w;
                        part[g] = part[g] + w;
                    }
                }
#pragma unroll
            for (int g = 0; g < 8; ++g) part[g] = tree32(part[g]);
            const float l = combine_parts(part);
            if (lane == 0) {
                if (s == 0) {
                    running_m[dist] = m, running_l[dist] = l;
                } else {
                    const float top = fmaxf(running_m[dist], m), ea = exp_c(running_m[dist] - top), eb = exp_c(m - top);
                    running_l[dist] = fma_(running_l[dist], ea, l * eb);
                    running_m[dist] = top, factor_a[dist] = ea, factor_b[dist] = eb;
                }
            }
        }
        __syncwarp();
        float o[PER_WARP][WIDE];
#pragma unroll
        for (int i = 0; i < PER_WARP; ++i)
#pragma unroll
            for (int d = 0; d < WIDE; ++d) o[i][d] = 0.0f;
        const float* w0 = scores + warp * PER_WARP * a.capacity;
        n_min = min(n_min, n_max);
        int j = 0;
        for (; j + 4 <= n_min; j += 4) {
            const float* from = a.v_pool + kv_offset(table, first + j, a.layers, a.layer, kv_dim) + kv_head * D + lane * WIDE;
            float v[4][WIDE];
#pragma unroll
            for (int t = 0; t < 4; ++t) load_wide(from + t * kv_dim, v[t]);
#pragma unroll
            for (int i = 0; i < PER_WARP; ++i) {
                const float4 w = *reinterpret_cast<const float4*>(w0 + i * a.capacity + j);
#pragma unroll
                for (int d = 0; d < WIDE; ++d) {
                    float t = o[i][d];
                    t = fma_(w.x, v[0][d], t);
                    t = fma_(w.y, v[1][d], t);
                    t = fma_(w.z, v[2][d], t);
                    o[i][d] = fma_(w.w, v[3][d], t);
                }
            }
        }
        // The causal edge: each distribution stops at its own position.
        for (; j < n_max; ++j) {
            const float* from = a.v_pool + kv_offset(table, first + j, a.layers, a.layer, kv_dim) + kv_head * D + lane * WIDE;
            float v[WIDE];
            load_wide(from, v);
#pragma unroll
            for (int i = 0; i < PER_WARP; ++i) {
                if (first + j <= pos0 + (warp * PER_WARP + i) / HEADS) {
                    const float w = w0[i * a.capacity + j];
#pragma unroll
                    for (int d = 0; d < WIDE; ++d) o[i][d] = fma_(w, v[d], o[i][d]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < PER_WARP; ++i) {
            const int dist = warp * PER_WARP + i;
            const bool visible = first <= pos0 + dist / HEADS;
#pragma unroll
            for (int d = 0; d < WIDE; ++d) {
                if (s == 0) total[i][d] = o[i][d];
                else if (visible) total[i][d] = fma_(total[i][d], factor_a[dist], o[i][d] * factor_b[dist]);
            }
        }
        __syncthreads();
    }
    grid_launch_next();
#pragma unroll
    for (int i = 0; i < PER_WARP; ++i) {
        const int dist = warp * PER_WARP + i, row = dist / HEADS, head = dist % HEADS;
        if (row >= rows || head >= heads) continue;
        const float inverse = __fdiv_rn(1.0f, running_l[dist]);
        float* out = a.out + (size_t)(token0 + row) * a.heads * D + (head0 + head) * D + lane * WIDE;
#pragma unroll
        for (int d = 0; d < WIDE; ++d) out[d] = total[i][d] * inverse;
    }
}

// Left to itself (0) the compiler makes room for so many blocks of head dimension 32 that it spills (sm_86, sm_89).
#define BLOCKS_AT_LEAST (HEAD_DIM == 32 ? 1 : 0)
extern "C" __global__ void __launch_bounds__(128, BLOCKS_AT_LEAST) attend_prefill_8x4(AttendArgs a) { attend_prefill<8, 4>(a); }
extern "C" __global__ void __launch_bounds__(128, BLOCKS_AT_LEAST) attend_prefill_4x4(AttendArgs a) { attend_prefill<4, 4>(a); }
extern "C" __global__ void __launch_bounds__(128, BLOCKS_AT_LEAST) attend_prefill_16x1(AttendArgs a) { attend_prefill<16, 1>(a); }
