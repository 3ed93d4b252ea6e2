// Attention of single positions: one query row an entry, its history spread over blocks by segment.
//
// FUSED 1 also rotates q and k, and stores the position's k and v into the pools (the pool is never read at the entry's own position);
// FUSED 0 expects rope_kv to have run. Grid: (kv_heads * ceil(group/HEADS), entries, splits); block z takes segments z, z + splits, ...;
// the block that finishes last folds the partial results in segment order. Block: 256 threads.
// What the history holds is older than this pass, so a fused block asks for its keys and values before it waits for its predecessor.
// Scores: one thread a key, the key in registers. Values: 64 positions a stage, two to four stages of cp.async, one thread a component.
// With oq the result is quantised: a warp holds the 32 components of one activation block.
// Shared memory, dynamic: (HEADS*D + D + HEADS*capacity + STAGES*64*D) floats, capacity = min(segment, history rounded up to 256).
#include "attention.cuh"

#if HEAD_DIM <= 64
#define HEADS 4
#else
#define HEADS 2
#endif
#define STAGE 64
#define STAGES (HEAD_DIM <= 64 ? 4 : 2)

extern __shared__ __align__(16) float shared[];

struct Entry {
    const float* row;   // qkv
    const u32* table;
    u32 pos;
    int head0, heads, kv_head;
};

// Position of a sequence inside a pool, its page read past L1: the table may be younger than what L1 holds before the wait.
__device__ __forceinline__ size_t history_offset(const AttendArgs& a, const Entry& e, u32 j) {
    const size_t page = __ldcg(e.table + (j >> 4));
    return ((page * a.layers + a.layer) * 16 + (j & 15)) * (a.kv_heads * D) + e.kv_head * D;
}

// Value rows first..=last into a stage; a fused entry's own position is skipped, it comes from the step's row.
__device__ __forceinline__ void fetch_values(const AttendArgs& a, const Entry& e, float* stage, int first, int last) {
#pragma unroll 4
    for (int i = threadIdx.x; i < STAGE * D / 4; i += 256) {
        const int row = i / (D / 4), d = i % (D / 4) * 4, j = first + row;
        if (j > last) break;
        if (!(FUSED && j == (int)e.pos)) copy_async16(stage + row * D + d, a.v_pool + history_offset(a, e, j) + d);
    }
    asm volatile("cp.async.commit_group;");
}

__device__ __forceinline__ float2 rotate(float x0, float x1, float2 cs) {
    return make_float2(fma_(x0, cs.x, -(x1 * cs.y)), fma_(x1, cs.x, x0 * cs.y));
}

// A fused entry's own value row, where a stage starting at `first` holds its position.
__device__ __forceinline__ void own_value(const AttendArgs& a, const Entry& e, float* stage, int first) {
    const int row = (int)e.pos - first;
    if (FUSED && row >= 0 && row < STAGE && threadIdx.x < D)
        stage[row * D + threadIdx.x] = e.row[(a.heads + a.kv_heads + e.kv_head) * D + threadIdx.x];
}

__device__ __forceinline__ void load_history(const float* __restrict__ from, float (&k)[D]) {
#pragma unroll
    for (int d = 0; d < D; d += 4) {
        const float4 v = __ldcg(reinterpret_cast<const float4*>(from + d));
        k[d] = v.x, k[d + 1] = v.y, k[d + 2] = v.z, k[d + 3] = v.w;
    }
}

__device__ __forceinline__ void write_out(const AttendArgs& a, int token, int head, int d, float v) {
    const size_t at = ((size_t)token * a.heads + head) * D + d;
    if (!a.oq) {
        a.out[at] = v;
        return;
    }
    float scale;
    int sum;
    a.oq[at] = (i8)quantise_lane(v, scale, sum);
    if ((threadIdx.x & 31) == 0) a.oda[at / 32] = scale, a.osa[at / 32] = scale * (float)sum;
}

// q (rotated when FUSED) and, when FUSED, the rotated k into shared memory; `store` also writes k and v to the pools.
__device__ __forceinline__ void load_queries(const AttendArgs& a, const Entry& e, float* q, float* k_new, bool store) {
    const int kv_dim = a.kv_heads * D;
    const float* k = e.row + a.heads * D + e.kv_head * D;
    if (!FUSED) {
#pragma unroll 1
        for (int i = threadIdx.x; i < e.heads * D; i += 256) q[i] = e.row[e.head0 * D + i];
        return;
    }
    const size_t at = kv_offset(e.table, e.pos, a.layers, a.layer, kv_dim) + e.kv_head * D;
#pragma unroll 1
    for (int i = threadIdx.x; i < (e.heads + 1) * (D / 2); i += 256) {
        const int head = i / (D / 2), pair = i % (D / 2);
        const int first = a.adjacent ? 2 * pair : pair, second = a.adjacent ? 2 * pair + 1 : pair + D / 2;
        const bool is_key = head == e.heads;
        const float* x = is_key ? k : e.row + (e.head0 + head) * D;
        const float2 y = rotate(x[first], x[second], a.angles[(size_t)e.pos * (D / 2) + pair]);
        float* to = is_key ? k_new : q + head * D;
        to[first] = y.x;
        to[second] = y.y;
        if (is_key && store) {
            a.k_pool[at + first] = y.x;
            a.k_pool[at + second] = y.y;
        }
    }
    if (store)
#pragma unroll 1
        for (int i = threadIdx.x; i < D; i += 256) a.v_pool[at + i] = k[kv_dim + i];
}

extern "C" __global__ void __launch_bounds__(256, 1) attend_decode(AttendArgs a) {
    float* q = shared;
    float* k_new = q + HEADS * D;
    float* scores = k_new + D;
    float* values = scores + HEADS * a.capacity;
    __shared__ float maxima[HEADS][8], sums[HEADS][8];
    __shared__ int is_last;
    grid_launch_next();
    if (!FUSED) grid_wait();
    const int group = a.heads / a.kv_heads, chunks = (group + HEADS - 1) / HEADS, chunk = blockIdx.x % chunks;
    const int token = a.entries ? a.entries[blockIdx.y] : blockIdx.y, kv_dim = a.kv_heads * D;
    Entry e;
    e.pos = __ldcg(a.tok_pos + token);
    const u32 slot = __ldcg(a.tok_slot + token);
    const int segments = e.pos / a.segment + 1, split = blockIdx.z, splits = min((int)gridDim.z, segments);
    if (split >= splits) return;
    e.row = a.qkv + (size_t)token * (a.heads * D + 2 * kv_dim);
    e.table = a.tables + (size_t)slot * a.table_stride;
    e.kv_head = blockIdx.x / chunks;
    e.head0 = e.kv_head * group + chunk * HEADS;
    e.heads = min(HEADS, group - chunk * HEADS);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int my_head = threadIdx.x / D, my_d = threadIdx.x % D;
    const bool computes = my_head < e.heads;

    for (int s = split; s < segments; s += splits) {
        const int first = s * a.segment, last = min(first + a.segment - 1, (int)e.pos), n = last - first + 1;
        const int stages = (n + STAGE - 1) / STAGE;
        if (s != split) __syncthreads();
#pragma unroll 1
        for (int i = 0; i < STAGES; ++i) {
            if (i < stages) fetch_values(a, e, values + i * STAGE * D, first + i * STAGE, last);
            else asm volatile("cp.async.commit_group;");
        }
        int j = first + threadIdx.x;
        float k[D];
        if (j <= last && !(FUSED && j == (int)e.pos)) load_history(a.k_pool + history_offset(a, e, j), k);
        if (s == split) {
            if (FUSED) grid_wait();
            load_queries(a, e, q, k_new, chunk == 0 && (segments - 1) % splits == split);
        }
#pragma unroll 1
        for (int i = 0; i < min(STAGES, stages); ++i) own_value(a, e, values + i * STAGE * D, first + i * STAGE);
        __syncthreads();
        float highest[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; ++h) highest[h] = -3.402823466e38f;
#pragma unroll 1
        while (j <= last) {
            if (FUSED && j == (int)e.pos) load_head(k_new, k);
#pragma unroll 1
            for (int h = 0; h < e.heads; ++h) {
                const float x = score(q + h * D, k, a.scale);
                scores[h * a.capacity + j - first] = x;
            }
            j += 256;
            if (j <= last && !(FUSED && j == (int)e.pos)) load_history(a.k_pool + history_offset(a, e, j), k);
        }
        // Own scores only: no barrier. Heads past the last one repeat what shared memory holds and are not used.
#pragma unroll 1
        for (int i = threadIdx.x; i < n; i += 256)
#pragma unroll
            for (int h = 0; h < HEADS; ++h) highest[h] = fmaxf(highest[h], scores[h * a.capacity + i]);
#pragma unroll
        for (int h = 0; h < HEADS; ++h) highest[h] = max32(highest[h]);
        if (lane == 0)
#pragma unroll
            for (int h = 0; h < HEADS; ++h) maxima[h][warp] = highest[h];
        __syncthreads();
        float part[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            highest[h] = maxima[h][0], part[h] = 0.0f;
#pragma unroll
            for (int i = 1; i < 8; ++i) highest[h] = fmaxf(highest[h], maxima[h][i]);
        }
#pragma unroll 1
        for (int i = threadIdx.x; i < n; i += 256)
#pragma unroll
            for (int h = 0; h < HEADS; ++h) {
                const float w = exp_c(scores[h * a.capacity + i] - highest[h]);
                scores[h * a.capacity + i] = w;
                part[h] = part[h] + w;
            }
#pragma unroll
        for (int h = 0; h < HEADS; ++h) part[h] = tree32(part[h]);
        if (lane == 0)
#pragma unroll
            for (int h = 0; h < HEADS; ++h) sums[h][warp] = part[h];
        // The barrier of the first stage follows.

        float o = 0.0f;
        for (int stage = 0; stage < stages; ++stage) {
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1));
            __syncthreads();
            const float* v = values + (stage % STAGES) * STAGE * D + my_d;
            const float* w = scores + (computes ? my_head : 0) * a.capacity + stage * STAGE;
            const int count = min(STAGE, n - stage * STAGE);
            if (computes) {
                int j = 0;
#pragma unroll 1
                for (; j + 16 <= count; j += 16) {
#pragma unroll
                    for (int i = 0; i < 16; i += 4) {
                        const float4 w4 = *reinterpret_cast<const float4*>(w + j + i);
                        o = fma_(w4.x, v[(j + i) * D], o);
                        o = fma_(w4.y, v[(j + i + 1) * D], o);
                        o = fma_(w4.z, v[(j + i + 2) * D], o);
                        o = fma_(w4.w, v[(j + i + 3) * D], o);
                    }
                }
#pragma unroll 1
                for (; j < count; ++j) o = fma_(w[j], v[j * D], o);
            }
            const int next = stage + STAGES;
            if (next < stages) {
                __syncthreads();
                fetch_values(a, e, values + (next % STAGES) * STAGE * D, first + next * STAGE, last);
                own_value(a, e, values + (next % STAGES) * STAGE * D, first + next * STAGE);
            } else {
                asm volatile("cp.async.commit_group;");
            }
        }
        if (computes) {
            const float my_l = combine_parts(sums[my_head]);
            float my_m = maxima[my_head][0];
#pragma unroll
            for (int i = 1; i < 8; ++i) my_m = fmaxf(my_m, maxima[my_head][i]);
            const int head = e.head0 + my_head;
            if (segments == 1) {
                write_out(a, token, head, my_d, o * __fdiv_rn(1.0f, my_l));
            } else {
                float* p = a.partial + (((size_t)blockIdx.y * a.heads + head) * a.max_segments + s) * (D + 2);
                if (my_d == 0) p[0] = my_m, p[1] = my_l;
                p[2 + my_d] = o;
            }
        }
    }
    if (segments == 1) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        u32* counter = a.counters + blockIdx.y * gridDim.x + blockIdx.x;
        is_last = atomicAdd(counter, 1u) == (u32)splits - 1;
        if (is_last) *counter = 0;
    }
    __syncthreads();
    if (!is_last || !computes) return;
    __threadfence();
    const int head = e.head0 + my_head;
    const float* p = a.partial + ((size_t)blockIdx.y * a.heads + head) * a.max_segments * (D + 2);
    float M = __ldcg(p), L = __ldcg(p + 1), O = __ldcg(p + 2 + my_d);
#pragma unroll 1
    for (int s = 1; s < segments; ++s) {
        p += D + 2;
        const float m = __ldcg(p), l = __ldcg(p + 1), o = __ldcg(p + 2 + my_d);
        const float top = fmaxf(M, m), ea = exp_c(M - top), eb = exp_c(m - top);
        L = fma_(L, ea, l * eb);
        O = fma_(O, ea, o * eb);
        M = top;
    }
    write_out(a, token, head, my_d, O * __fdiv_rn(1.0f, L));
}
