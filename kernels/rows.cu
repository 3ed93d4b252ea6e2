// Everything that works on token rows one by one and multiplies no matrix.
//
// prepare   one block per row of the step: resolves Start::Device and Input::DeviceLast, advances the slot, writes one entry per
//           token row into tok_slot / tok_pos / tok_id.
// bind      one block per binding: writes a slot's page table and zeroes its position.
// embed_*   x[t] = row tok_id[t] of the embedding, dequantised as arith::dequantise_row / f32(q)*s. One block per token row. In a step of
//           single tokens it does what prepare does, too: a kernel less.
// norm_*    RMSNorm of a row, one block of 256 threads a row: thread t owns part t. _q8 also quantises the result (or, without a norm,
//           the row) per block of 32: a warp's 32 lanes hold one block.
// rope_kv   rotates q in place and k into the pool, copies v into the pool. One block per token row.
// swiglu    g, u -> (g/(1+exp_c(-g)))*u, elementwise.
#include "linear.cuh"

struct StepRow {
    u32 slot;
    u32 len;
    u32 token;       // first token row of this row
    u32 start;       // first position, or START_DEVICE
    u32 input;       // offset into the tokens of the step, or INPUT_LAST
    u32 reserved[3];
};
#define START_DEVICE 0xffffffffu
#define INPUT_LAST 0xffffffffu

extern "C" __global__ void bind(const u32* words, u32* tables, u32* position,
                                u32 table_stride) {
    // words: count, then per binding: slot, pages, offset of the pages in words.
    const u32* entry = words + 1 + 3 * blockIdx.x;
    const u32 slot = entry[0], pages = entry[1];
    const u32* from = words + entry[2];
    for (u32 i = threadIdx.x; i < pages; i += blockDim.x) tables[(size_t)slot * table_stride + i] = from[i];
    if (threadIdx.x == 0) position[slot] = 0;
}

extern "C" __global__ void prepare(const StepRow* rows, const u32* tokens, u32* position,
                                   const u32* last_token, u32* tok_slot, u32* tok_pos,
                                   u32* tok_id) {
    const StepRow row = rows[blockIdx.x];
    const u32 start = row.start == START_DEVICE ? position[row.slot] : row.start;
    grid_launch_next();
    __syncthreads();  // every thread has read the position before one advances it
    if (threadIdx.x == 0) position[row.slot] = start + row.len;
    for (u32 i = threadIdx.x; i < row.len; i += blockDim.x) {
        tok_slot[row.token + i] = row.slot;
        tok_pos[row.token + i] = start + i;
        tok_id[row.token + i] = row.input == INPUT_LAST ? last_token[row.slot] : tokens[row.input + i];
    }
}

struct EmbedArgs {
    const u32* tok_id;       // [token rows] as prepare left them; with rows: unused
    const StepRow* rows;     // [token rows], one token each; null: prepare has run
    const u32* tokens;
    u32* position;
    const u32* last_token;
    u32 *tok_slot, *tok_pos;
    const void* w;           // f32 or i8 [vocab][n]
    const void* scale;       // int8: f32 [vocab]; blocks: f16 [vocab][n/32]
    const u16* minimum;      // blocks with a minimum: f16 [vocab][n/32]
    float* x;                // [token rows][n]
    int n;
};

// The token of this block's row.
__device__ __forceinline__ u32 token_of(const EmbedArgs& a) {
    u32 id;
    if (!a.rows) {
        grid_wait();
        id = a.tok_id[blockIdx.x];
    } else {
        const StepRow row = a.rows[blockIdx.x];
        id = row.input == INPUT_LAST ? a.last_token[row.slot] : a.tokens[row.input];
        const u32 start = row.start == START_DEVICE ? a.position[row.slot] : row.start;
        __syncthreads();  // every thread has read the position before one advances it
        if (threadIdx.x == 0) {
            a.position[row.slot] = start + 1;
            a.tok_slot[blockIdx.x] = row.slot;
            a.tok_pos[blockIdx.x] = start;
        }
    }
    grid_launch_next();
    return id;
}

extern "C" __global__ void embed_f32(EmbedArgs a) {
    const float* from = static_cast<const float*>(a.w) + (size_t)token_of(a) * a.n;
    for (int i = threadIdx.x; i < a.n; i += blockDim.x) a.x[(size_t)blockIdx.x * a.n + i] = from[i];
}

extern "C" __global__ void embed_int8(EmbedArgs a) {
    const u32 id = token_of(a);
    const i8* from = static_cast<const i8*>(a.w) + (size_t)id * a.n;
    const float s = static_cast<const float*>(a.scale)[id];
    for (int i = threadIdx.x; i < a.n; i += blockDim.x) a.x[(size_t)blockIdx.x * a.n + i] = (float)from[i] * s;
}

extern "C" __global__ void embed_block(EmbedArgs a) {
    const u32 id = token_of(a);
    const i8* from = static_cast<const i8*>(a.w) + (size_t)id * a.n;
    const size_t first = (size_t)id * (a.n / 32);
    for (int i = threadIdx.x; i < a.n; i += blockDim.x) {
        float v = (float)from[i] * half_to_float(static_cast<const u16*>(a.scale)[first + i / 32]);
        if (a.minimum) v = v + half_to_float(a.minimum[first + i / 32]);
        a.x[(size_t)blockIdx.x * a.n + i] = v;
    }
}

#define NORM_HELD 1024  // values and weights of a row that stay in shared memory, each read by the thread that put it there

// Calls f(index, value) for every component of this thread, normalised unless w is null; warps stay whole. r = 1/sqrt(mean(x^2) + eps)
// in the order of arith::rms_norm. One copy of f: code that runs once waits for its instructions.
template <typename F>
__device__ __forceinline__ void normalised(const float* x, const u32* gather, const float* w,
                                           int n, float eps, F f) {
    __shared__ float values[NORM_HELD], weights[NORM_HELD], sums[8];
    grid_launch_next();
    if (w)
#pragma unroll
        for (int c = 0; c < NORM_HELD; c += 256)
            if (threadIdx.x + c < n) weights[threadIdx.x + c] = w[threadIdx.x + c];
    grid_wait();
    const float* from = x + (size_t)(gather ? gather[blockIdx.x] : blockIdx.x) * n;
    float held[NORM_HELD / 256], part = 0.0f, r = 1.0f;
#pragma unroll
    for (int c = 0; c < NORM_HELD / 256; ++c) held[c] = threadIdx.x + 256 * c < n ? from[threadIdx.x + 256 * c] : 0.0f;
#pragma unroll
    for (int c = 0; c < NORM_HELD / 256; ++c) {
        if (threadIdx.x + 256 * c < n) part = fma_(held[c], held[c], part);
        values[threadIdx.x + 256 * c] = held[c];
    }
    if (w) {
#pragma unroll 1
        for (int i = threadIdx.x + NORM_HELD; i < n; i += 256) {
            const float v = from[i];
            part = fma_(v, v, part);
        }
        part = tree32(part);
        if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = part;
        __syncthreads();
        r = __fdiv_rn(1.0f, __fsqrt_rn(__fdiv_rn(combine_parts(sums), (float)n) + eps));
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += 256) {
        const bool near = i < NORM_HELD;
        float v = near ? values[i] : from[i];
        if (w) v = (v * r) * (near ? weights[i] : w[i]);
        f(i, v);
    }
}

// Rows gathered through `gather` when it is not null.
extern "C" __global__ void __launch_bounds__(256) norm_f32(const float* x, const u32* gather,
                                                           const float* w, float* out, int n, float eps) {
    float* to = out + (size_t)blockIdx.x * n;
    normalised(x, gather, w, n, eps, [&](int i, float v) { to[i] = v; });
}

// xq [rows][n], da and sa [rows][n/32]; w null means no norm. n is a multiple of 32.
extern "C" __global__ void __launch_bounds__(256) norm_q8(const float* x, const u32* gather,
                                                          const float* w, i8* xq, float* da,
                                                          float* sa, int n, float eps) {
    const size_t row = (size_t)blockIdx.x * n;
    normalised(x, gather, w, n, eps, [&](int i, float v) {
        float d;
        int sum;
        xq[row + i] = (i8)quantise_lane(v, d, sum);
        if ((threadIdx.x & 31) == 0) da[(row + i) / 32] = d, sa[(row + i) / 32] = d * (float)sum;
    });
}

// qkv rows [q_dim + 2 kv_dim]; angles [context][head_dim/2] of (cos, sin); adjacent: pairs (2i, 2i+1), else (i, i + D/2).
struct RopeArgs {
    float* qkv;
    const float2* angles;
    const u32 *tok_slot, *tok_pos, *tables;
    float *k_pool, *v_pool;
    int heads, kv_heads, head_dim, layers, layer, table_stride, adjacent;
};

extern "C" __global__ void rope_kv(RopeArgs a) {
    grid_wait();
    const int half = a.head_dim / 2, q_dim = a.heads * a.head_dim, kv_dim = a.kv_heads * a.head_dim;
    float* row = a.qkv + (size_t)blockIdx.x * (q_dim + 2 * kv_dim);
    const u32 pos = a.tok_pos[blockIdx.x];
    const u32* table = a.tables + (size_t)a.tok_slot[blockIdx.x] * a.table_stride;
    const size_t at = kv_offset(table, pos, a.layers, a.layer, kv_dim);
    const float2* angle = a.angles + (size_t)pos * half;
    for (int i = threadIdx.x; i < (a.heads + a.kv_heads) * half; i += blockDim.x) {
        const int head = i / half, pair = i % half;
        const int first = a.adjacent ? 2 * pair : pair, second = a.adjacent ? 2 * pair + 1 : pair + half;
        float* x = row + head * a.head_dim;
        const float x0 = x[first], x1 = x[second];
        const float2 cs = angle[pair];
        const float y0 = fma_(x0, cs.x, -(x1 * cs.y)), y1 = fma_(x1, cs.x, x0 * cs.y);
        float* to = head < a.heads ? x : a.k_pool + at + (head - a.heads) * a.head_dim;
        to[first] = y0;
        to[second] = y1;
    }
    for (int i = threadIdx.x; i < kv_dim; i += blockDim.x) a.v_pool[at + i] = row[q_dim + kv_dim + i];
}

extern "C" __global__ void swiglu_rows(const float* gate, const float* up, float* out, u64 n) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = swiglu(gate[i], up[i]);
}
