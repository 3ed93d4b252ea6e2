// Attention of single positions: one query row an entry, its history spread over blocks by segment.
//
// FUSED 1 also rotates q and k, and stores the position's k and v into the pools (the pool is never read at the entry's own position);
// FUSED 0 expects rope_kv to have run. Grid: (kv_heads * ceil(group/HEADS), entries, splits); block z takes segments z, z + splits, ...;
// the block that finishes last folds the partial results in segment order. Block: 256 threads.
// Scores: one thread a key, the key in registers. Values: 64 positions a stage, two to four stages of cp.async, one thread a component.
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

// Value row of position j: the pool, or the step's own row for the entry's position when the pool does not have it yet.
__device__ __forceinline__ void fetch_values(const AttendArgs& a, const Entry& e, float* stage, int first, int last) {
    const int kv_dim = a.kv_heads * D;
    for (int i = threadIdx.x; i < STAGE * D / 4; i += 256) {
        const int row = i / (D / 4), d = i % (D / 4) * 4, j = first + row;
        if (j > last) break;
        const float* from = FUSED && j == (int)e.pos ? e.row + a.heads * D + kv_dim + e.kv_head * D
                                                     : a.v_pool + kv_offset(e.table, j, a.layers, a.layer, kv_dim) + e.kv_head * D;
        const u32 to = (u32)__cvta_generic_to_shared(stage + row * D + d);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from + d));
    }
    asm volatile("cp.async.commit_group;");
}

__device__ __forceinline__ float2 rotate(float x0, float x1, float2 cs) {
    return make_float2(fma_(x0, cs.x, -(x1 * cs.y)), fma_(x1, cs.x, x0 * cs.y));
}

// q (rotated when FUSED) and, when FUSED, the rotated k into shared memory; `store` also writes k and v to the pools.
__device__ __forceinline__ void load_queries(const AttendArgs& a, const Entry& e, float* q, float* k_new, bool store) {
    const int kv_dim = a.kv_heads * D;
    const float* k = e.row + a.heads * D + e.kv_head * D;
    if (!FUSED) {
        for (int i = threadIdx.x; i < e.heads * D; i += 256) q[i] = e.row[e.head0 * D + i];
        return;
    }
    const size_t at = kv_offset(e.table, e.pos, a.layers, a.layer, kv_dim) + e.kv_head * D;
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
        for (int i = threadIdx.x; i < D; i += 256) a.v_pool[at + i] = k[kv_dim + i];
}

extern "C" __global__ void __launch_bounds__(256, 1) attend_decode(AttendArgs a) {
    float* q = shared;
    float* k_new = q + HEADS * D;
    float* scores = k_new + D;
    float* values = scores + HEADS * a.capacity;
    __shared__ float maxima[HEADS][8], sums[HEADS][8], segment_max[HEADS];
    __shared__ int is_last;
    grid_launch_next();
    grid_wait();
    const int group = a.heads / a.kv_heads, chunks = (group + HEADS - 1) / HEADS, chunk = blockIdx.x % chunks;
    const int token = a.entries ? a.entries[blockIdx.y] : blockIdx.y, kv_dim = a.kv_heads * D;
    Entry e;
    e.pos = a.tok_pos[token];
    const int segments = e.pos / a.segment + 1, split = blockIdx.z, splits = min((int)gridDim.z, segments);
    if (split >= splits) return;
    e.row = a.qkv + (size_t)token * (a.heads * D + 2 * kv_dim);
    e.table = a.tables + (size_t)a.tok_slot[token] * a.table_stride;
    e.kv_head = blockIdx.x / chunks;
    e.head0 = e.kv_head * group + chunk * HEADS;
    e.heads = min(HEADS, group - chunk * HEADS);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int my_head = threadIdx.x / D, my_d = threadIdx.x % D;
    const bool computes = my_head < e.heads;

    for (int s = split; s < segments; s += splits) {
        const int first = s * a.segment, last = min(first + a.segment - 1, (int)e.pos), n = last - first + 1;
        const int stages = (n + STAGE - 1) / STAGE;
        __syncthreads();
        for (int i = 0; i < STAGES; ++i) {
            if (i < stages) fetch_values(a, e, values + i * STAGE * D, first + i * STAGE, last);
            else asm volatile("cp.async.commit_group;");
        }
        if (s == split) {
            load_queries(a, e, q, k_new, chunk == 0 && (segments - 1) % splits == split);
            __syncthreads();
        }
        for (int j = first + threadIdx.x; j <= last; j += 256) {
            float k[D];
            const float* from = FUSED && j == (int)e.pos
                                    ? k_new
                                    : a.k_pool + kv_offset(e.table, j, a.layers, a.layer, kv_dim) + e.kv_head * D;
            load_head(from, k);
#pragma unroll 1
            for (int h = 0; h < e.heads; ++h) scores[h * a.capacity + j - first] = score(q + h * D, k, a.scale);
        }
        __syncthreads();
        // One copy of the softmax's code for all heads: straight-line code that runs once is bound by instruction fetch.
#pragma unroll 1
        for (int h = 0; h < e.heads; ++h) {
            float best = -3.402823466e38f;
            for (int i = threadIdx.x; i < n; i += 256) best = fmaxf(best, scores[h * a.capacity + i]);
            best = max32(best);
            if (lane == 0) maxima[h][warp] = best;
        }
        __syncthreads();
#pragma unroll 1
        for (int h = 0; h < e.heads; ++h) {
            float m = maxima[h][0];
#pragma unroll
            for (int i = 1; i < 8; ++i) m = fmaxf(m, maxima[h][i]);
            float part = 0.0f;
            for (int i = threadIdx.x; i < n; i += 256) {
                const float w = exp_c(scores[h * a.capacity + i] - m);
                scores[h * a.capacity + i] = w;
                part = part + w;
            }
            part = tree32(part);
            if (lane == 0) sums[h][warp] = part;
            if (threadIdx.x == 0) segment_max[h] = m;
        }
        __syncthreads();

        float o = 0.0f;
        for (int stage = 0; stage < stages; ++stage) {
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1));
            __syncthreads();
            const float* v = values + (stage % STAGES) * STAGE * D + my_d;
            const float* w = scores + (computes ? my_head : 0) * a.capacity + stage * STAGE;
            const int count = min(STAGE, n - stage * STAGE);
            if (computes) {
                int j = 0;
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
                for (; j < count; ++j) o = fma_(w[j], v[j * D], o);
            }
            __syncthreads();
            const int next = stage + STAGES;
            if (next < stages) fetch_values(a, e, values + (next % STAGES) * STAGE * D, first + next * STAGE, last);
            else asm volatile("cp.async.commit_group;");
        }
        if (computes) {
            const float my_m = segment_max[my_head], my_l = combine_parts(sums[my_head]);
            const int head = e.head0 + my_head;
            if (segments == 1) {
                a.out[(size_t)token * a.heads * D + head * D + my_d] = o * __fdiv_rn(1.0f, my_l);
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
    for (int s = 1; s < segments; ++s) {
        p += D + 2;
        const float m = __ldcg(p), l = __ldcg(p + 1), o = __ldcg(p + 2 + my_d);
        const float top = fmaxf(M, m), ea = exp_c(M - top), eb = exp_c(m - top);
        L = fma_(L, ea, l * eb);
        O = fma_(O, ea, o * eb);
        M = top;
    }
    a.out[(size_t)token * a.heads * D + head * D + my_d] = O * __fdiv_rn(1.0f, L);
}
