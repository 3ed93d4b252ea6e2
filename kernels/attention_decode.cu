// Attention of single positions: one query row an entry, its history spread over blocks by segment.
//
// A block takes `block_heads` query heads, the sooner done the fewer. A long history takes more heads a block until as many histories
// like it would fit the device's `room` at once; the blocks that this frees share its segments.
// FUSED 1 also rotates q and k, and stores the position's k and v into the pools (the pool is never read at the entry's own position);
// FUSED 0 expects rope_kv to have run. Grid: (kv_heads * ceil(group/block_heads), entries, splits); a block takes every so many-th
// segment, the one that finishes last folds the partial results in segment order. Block: 256 threads.
// What the history holds is older than this pass, so a fused block asks for its keys and values before it waits for its predecessor. The
// slot and the position that lead there are written by the pass's first kernel: in layer 0 a block waits for that before it reads them, and
// before it lets any later kernel of the pass begin.
// Keys and values come through rings of DEPTH stages of 64 positions (cp.async, whole rows). Scores and weights: a thread is one of 64
// positions and one head. Values: a thread is one component. With oq the result is quantised: a warp holds one activation block.
// Shared memory, dynamic: (HEADS*D + D + HEADS*capacity + DEPTH*64*(2*D + 4)) floats, capacity = min(segment, history rounded up to 256).
// Limits: a segment is at most 16 * PAGES positions. Oracle: arith::attend.
#include "attention.cuh"

#if HEAD_DIM <= 64
#define HEADS 4
#else
#define HEADS 2
#endif
#define STAGE 64
#define KEY (D + 4)  // floats of a key in shared memory: eight lanes read eight rows without a conflict
// Stages that fit shared memory: the launcher's decode_depth.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
#define DEPTH (HEAD_DIM <= 64 ? 2 : 1)
#else
#define DEPTH (HEAD_DIM <= 64 ? 4 : 2)
#endif

extern __shared__ __align__(16) float shared[];

#define PAGES 64  // pages of a segment: the launcher lets no segment be longer than 16 * PAGES

struct Entry {
    const float* row;    // qkv
    const u32* table;
    const u32* pages;    // shared: the pages of the segment at hand
    u32 pos;
    int head0, heads, kv_head;
};

// What a block does: heads head0.. of kv_head, segments split, split + splits, ...
struct Share {
    int kv_head, head0, heads, chunk, column, split, splits;
};

__device__ __forceinline__ Share share_of(const AttendArgs& a, int segments) {
    const int group = a.heads / a.kv_heads, launched = (group + a.block_heads - 1) / a.block_heads;
    int heads = a.block_heads, merged = 1;
    auto blocks = [&]() { return a.kv_heads * ((group + heads - 1) / heads) * (int)gridDim.y * segments; };
    while (2 * heads <= HEADS && blocks() > a.room) heads *= 2, merged *= 2;
    const int index = blockIdx.x % launched;
    Share s;
    s.kv_head = blockIdx.x / launched;
    s.chunk = index / merged;
    s.head0 = s.kv_head * group + s.chunk * heads;
    s.heads = min(heads, group - s.chunk * heads);
    s.column = s.kv_head * launched + s.chunk;
    const int sharing = min(merged, launched - s.chunk * merged);
    s.split = blockIdx.z * sharing + index % merged;
    s.splits = gridDim.z * sharing;
    return s;
}

// Where position j, at `index` of its segment, lies in a pool.
__device__ __forceinline__ size_t history_offset(const AttendArgs& a, const Entry& e, int index) {
    return (((size_t)e.pages[index >> 4] * a.layers + a.layer) * 16 + (index & 15)) * (a.kv_heads * D) + e.kv_head * D;
}

// The pages of positions first..=last, read past L1: before the wait the table may be younger than what L1 holds. A barrier follows.
__device__ __forceinline__ void load_pages(const Entry& e, u32* pages, int first, int last) {
    if (threadIdx.x <= (last - first) / 16) pages[threadIdx.x] = __ldcg(e.table + first / 16 + threadIdx.x);
}

// Rows `index`.. of a segment of n from a pool into a stage of rows of `width` floats, one commit; `own` is left out, it comes from the
// step's row.
__device__ __forceinline__ void fetch_rows(const AttendArgs& a, const Entry& e, const float* pool, float* stage, int width, int index,
                                           int n, int own) {
#pragma unroll
    for (int c = 0; c < STAGE * D / 1024; ++c) {
        const int i = threadIdx.x + 256 * c, row = i / (D / 4), d = i % (D / 4) * 4;
        if (index + row < n && index + row != own) copy_async16(stage + row * width + d, pool + history_offset(a, e, index + row) + d);
    }
    copy_async_commit();
}

__device__ __forceinline__ float2 rotate(float x0, float x1, float2 cs) {
    return make_float2(fma_(x0, cs.x, -(x1 * cs.y)), fma_(x1, cs.x, x0 * cs.y));
}

// q (rotated when FUSED) and, when FUSED, the rotated k into shared memory, one pair or quad a thread; `at` >= 0 also stores k and v
// there in the pools. Returns, in the threads that own_value counts, a component of the value row.
__device__ __forceinline__ float load_queries(const AttendArgs& a, const Entry& e, float* q, float* k_new, float2 cs, long long at) {
    if (!FUSED) {
#pragma unroll 1
        for (int i = threadIdx.x; i < e.heads * D; i += 256) q[i] = e.row[e.head0 * D + i];
        return 0.0f;
    }
    const float* k = e.row + (a.heads + e.kv_head) * D;
    const int back = 255 - (int)threadIdx.x, head = threadIdx.x / (D / 2), pair = threadIdx.x % (D / 2);
    const int first = a.adjacent ? 2 * pair : pair, second = a.adjacent ? 2 * pair + 1 : pair + D / 2;
    const bool is_key = head == e.heads;
    const float* x = is_key ? k : e.row + (e.head0 + head) * D;
    const float value = back < D ? k[a.kv_heads * D + back] : 0.0f;
    if (head <= e.heads) {
        const float2 y = rotate(x[first], x[second], cs);
        float* to = is_key ? k_new : q + head * D;
        to[first] = y.x;
        to[second] = y.y;
        if (is_key && at >= 0) {
            a.k_pool[at + first] = y.x;
            a.k_pool[at + second] = y.y;
        }
    }
    if (at >= 0 && back < D) a.v_pool[at + back] = value;
    return value;
}

// A fused entry's own value row, where the stage that starts at `index` holds it.
__device__ __forceinline__ void own_value(float* stage, int index, int own, float value) {
    const int row = own - index, back = 255 - (int)threadIdx.x;
    if (row >= 0 && row < STAGE && back < D) stage[row * D + back] = value;
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

// o = chain over up to 64 positions of a stage: 16 at a time, their loads ahead of the chain.
__device__ __forceinline__ float weigh(const float* w, const float* v, int count, float o) {
#pragma unroll 1
    for (int j = 0; j < count; j += 16) {
        float x[16], y[16];
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            const float4 w4 = *reinterpret_cast<const float4*>(w + j + i);
            x[i] = w4.x, x[i + 1] = w4.y, x[i + 2] = w4.z, x[i + 3] = w4.w;
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) y[i] = v[(j + i) * D];
#pragma unroll
        for (int i = 0; i < 16; ++i)
            if (j + i < count) o = fma_(x[i], y[i], o);
    }
    return o;
}

// The score of a key in shared memory.
__device__ __forceinline__ float score_shared(const float* q, const float* key, float scale) {
    float k[D];
    load_head(key, k);
    return score(q, k, scale);
}

extern "C" __global__ void __launch_bounds__(256, 1) attend_decode(AttendArgs a) {
    float* q = shared;
    float* k_new = q + HEADS * D;
    float* scores = k_new + D;
    float* keys = scores + HEADS * a.capacity;
    float* values = keys + DEPTH * STAGE * KEY;
    __shared__ float maxima[HEADS][2], sums[HEADS][8];
    __shared__ u32 pages[PAGES];
    __shared__ int is_last;
    if (FUSED && a.layer == 0) grid_wait();
    grid_launch_next();
    if (!FUSED) grid_wait();
    const int token = a.entries ? a.entries[blockIdx.y] : blockIdx.y, kv_dim = a.kv_heads * D;
    Entry e;
    e.pos = __ldcg(a.tok_pos + token);
    const u32 slot = __ldcg(a.tok_slot + token);
    const int segments = e.pos / a.segment + 1;
    const Share share = share_of(a, segments);
    const int split = share.split, splits = min(share.splits, segments);
    if (split >= splits) return;
    e.row = a.qkv + (size_t)token * (a.heads * D + 2 * kv_dim);
    e.table = a.tables + (size_t)slot * a.table_stride;
    e.pages = pages;
    e.kv_head = share.kv_head;
    e.head0 = share.head0;
    e.heads = share.heads;
    const int lane = threadIdx.x & 31, half = (threadIdx.x >> 5) & 1;
    const int key = threadIdx.x % STAGE, key_head = threadIdx.x / STAGE;
    const int my_head = threadIdx.x / D, my_d = threadIdx.x % D;
    const bool scoring = key_head < e.heads, computes = my_head < e.heads;
    float2 cs = make_float2(0.0f, 0.0f);
    float value = 0.0f;
#pragma unroll 1
    for (int s = split; s < segments; s += splits) {
        const int first = s * a.segment, last = min(first + a.segment - 1, (int)e.pos), n = last - first + 1;
        const int stages = (n + STAGE - 1) / STAGE, own = FUSED ? (int)e.pos - first : -1;
        if (s != split) __syncthreads();
        load_pages(e, pages, first, last);
        __syncthreads();
#pragma unroll 1
        for (int c = 0; c < DEPTH; ++c) fetch_rows(a, e, a.k_pool, keys + c * STAGE * KEY, KEY, c * STAGE, n, own);
#pragma unroll 1
        for (int c = 0; c < DEPTH; ++c) fetch_rows(a, e, a.v_pool, values + c * STAGE * D, D, c * STAGE, n, own);
        // Keys and values that wait for room: to L2 at least.
#pragma unroll 1
        for (int later = threadIdx.x + DEPTH * STAGE; later < n; later += 256)
#pragma unroll
            for (int d = 0; d < D; d += 32) {
                asm volatile("prefetch.global.L2 [%0];" ::"l"(a.k_pool + history_offset(a, e, later) + d));
                asm volatile("prefetch.global.L2 [%0];" ::"l"(a.v_pool + history_offset(a, e, later) + d));
            }
        if (s == split) {
            long long at = -1;
            if (FUSED) {
                const bool store = share.chunk == 0 && (segments - 1) % splits == split;
                const size_t page = __ldcg(e.table + (e.pos >> 4));
                if (store) at = ((page * a.layers + a.layer) * 16 + (e.pos & 15)) * kv_dim + e.kv_head * D;
                cs = a.angles[(size_t)e.pos * (D / 2) + threadIdx.x % (D / 2)];
                grid_wait();
            }
            value = load_queries(a, e, q, k_new, cs, at);
        }
        if (FUSED)
#pragma unroll 1
            for (int c = 0; c < DEPTH; ++c) own_value(values + c * STAGE * D, c * STAGE, own, value);

        float* x = scores + (scoring ? key_head : 0) * a.capacity;
        float best = -3.402823466e38f;
#pragma unroll 1
        for (int c = 0; c < stages; ++c) {
            // Behind the first DEPTH keys lie as many values; behind a refilled stage only refills.
            if (c < DEPTH) copy_async_wait<2 * DEPTH - 1>();
            else copy_async_wait<DEPTH - 1>();
            __syncthreads();
            float* held = keys + (c % DEPTH) * STAGE * KEY;
            const int i = c * STAGE + key;
            if (scoring && i < n) {
                x[i] = score_shared(q + key_head * D, i == own ? k_new : held + key * KEY, a.scale);
                best = fmaxf(best, x[i]);
            }
            const int next = (c + DEPTH) * STAGE;
            if (next < n) __syncthreads();
            fetch_rows(a, e, a.k_pool, held, KEY, next, n, own);
        }
        best = max32(best);
        if (scoring && lane == 0) maxima[key_head][half] = best;
        __syncthreads();
        // Part t of the canonical sum holds positions t, t + 256, ...: this thread has parts key, key + 64, key + 128 and key + 192.
        if (scoring) {
            const float m = fmaxf(maxima[key_head][0], maxima[key_head][1]);
            float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
            for (int base = key; base < n; base += 256)
#pragma unroll
                for (int u = 0; u < 4; ++u) {
                    const int i = base + STAGE * u;
                    if (i < n) {
                        const float w = exp_c(x[i] - m);
                        x[i] = w;
                        part[u] = part[u] + w;
                    }
                }
#pragma unroll
            for (int u = 0; u < 4; ++u) part[u] = tree32(part[u]);
            if (lane == 0)
#pragma unroll
                for (int u = 0; u < 4; ++u) sums[key_head][2 * u + half] = part[u];
        }
        // The barrier of the first stage follows.

        float o = 0.0f;
#pragma unroll 1
        for (int c = 0; c < stages; ++c) {
            copy_async_wait<DEPTH - 1>();
            __syncthreads();
            float* held = values + (c % DEPTH) * STAGE * D;
            const float* w = scores + (computes ? my_head : 0) * a.capacity + c * STAGE;
            if (computes) o = weigh(w, held + my_d, min(STAGE, n - c * STAGE), o);
            const int next = (c + DEPTH) * STAGE;
            if (next < n) {
                __syncthreads();
                if (FUSED) own_value(held, next, own, value);
            }
            fetch_rows(a, e, a.v_pool, held, D, next, n, own);
        }
        if (computes) {
            const float my_l = combine_parts(sums[my_head]);
            const float my_m = fmaxf(maxima[my_head][0], maxima[my_head][1]);
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
        u32* counter = a.counters + blockIdx.y * gridDim.x + share.column;
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
