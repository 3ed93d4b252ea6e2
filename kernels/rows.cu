// Everything that works on token rows one by one and multiplies no matrix.
//
// prepare   one block per row of the step: resolves Start::Device and Input::DeviceLast, advances the slot, writes one entry per
//           token row into tok_slot / tok_pos / tok_id.
// bind      one block per binding: writes a slot's page table and zeroes its position.
// embed_*   x[t] = row tok_id[t] of the embedding, dequantised as arith::dequantise_row / f32(q)*s. One block per token row.
// norm_*    RMSNorm of a row, one warp per row; _q8 also quantises the result per block of 32.
// quantise  per block of 32, eight lanes a block.
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

extern "C" __global__ void bind(const u32* __restrict__ words, u32* __restrict__ tables, u32* __restrict__ position,
                                u32 table_stride) {
    // words: count, then per binding: slot, pages, offset of the pages in words.
    const u32* entry = words + 1 + 3 * blockIdx.x;
    const u32 slot = entry[0], pages = entry[1];
    const u32* from = words + entry[2];
    for (u32 i = threadIdx.x; i < pages; i += blockDim.x) tables[(size_t)slot * table_stride + i] = from[i];
    if (threadIdx.x == 0) position[slot] = 0;
}

extern "C" __global__ void prepare(const StepRow* __restrict__ rows, const u32* __restrict__ tokens, u32* __restrict__ position,
                                   const u32* __restrict__ last_token, u32* __restrict__ tok_slot, u32* __restrict__ tok_pos,
                                   u32* __restrict__ tok_id) {
    const StepRow row = rows[blockIdx.x];
    const u32 start = row.start == START_DEVICE ? position[row.slot] : row.start;
    __syncthreads();  // every thread has read the position before one advances it
    if (threadIdx.x == 0) position[row.slot] = start + row.len;
    for (u32 i = threadIdx.x; i < row.len; i += blockDim.x) {
        tok_slot[row.token + i] = row.slot;
        tok_pos[row.token + i] = start + i;
        tok_id[row.token + i] = row.input == INPUT_LAST ? last_token[row.slot] : tokens[row.input + i];
    }
}

extern "C" __global__ void embed_f32(const u32* __restrict__ tok_id, const float* __restrict__ table, float* __restrict__ x, int n) {
    const float* from = table + (size_t)tok_id[blockIdx.x] * n;
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[(size_t)blockIdx.x * n + i] = from[i];
}

extern "C" __global__ void embed_int8(const u32* __restrict__ tok_id, const i8* __restrict__ q, const float* __restrict__ scale,
                                      float* __restrict__ x, int n) {
    const u32 id = tok_id[blockIdx.x];
    const float s = scale[id];
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[(size_t)blockIdx.x * n + i] = (float)q[(size_t)id * n + i] * s;
}

extern "C" __global__ void embed_block(const u32* __restrict__ tok_id, const i8* __restrict__ q, const u16* __restrict__ scale,
                                       const u16* __restrict__ minimum, float* __restrict__ x, int n) {
    const u32 id = tok_id[blockIdx.x];
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const size_t block = (size_t)id * (n / 32) + i / 32;
        float v = (float)q[(size_t)id * n + i] * half_to_float(scale[block]);
        if (minimum) v = v + half_to_float(minimum[block]);
        x[(size_t)blockIdx.x * n + i] = v;
    }
}

// Rows gathered through `gather` when it is not null.
extern "C" __global__ void norm_f32(const float* __restrict__ x, const u32* __restrict__ gather, const float* __restrict__ w,
                                    float* __restrict__ out, int rows, int n, float eps) {
    grid_wait();
    const int row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (row >= rows) return;
    const int lane = threadIdx.x & 31;
    const float* from = x + (size_t)(gather ? gather[row] : row) * n;
    const float r = rms_scale(from, n, eps);
    for (int i = lane; i < n; i += 32) out[(size_t)row * n + i] = (from[i] * r) * w[i];
}

// xq [rows][n], da and sa [rows][n/32]; w null means no norm. n is a multiple of 32.
extern "C" __global__ void norm_q8(const float* __restrict__ x, const u32* __restrict__ gather, const float* __restrict__ w,
                                   i8* __restrict__ xq, float* __restrict__ da, float* __restrict__ sa, int rows, int n, float eps) {
    grid_wait();
    const int row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (row >= rows) return;
    const int lane = threadIdx.x & 31;
    const float* from = x + (size_t)(gather ? gather[row] : row) * n;
    const float r = w ? rms_scale(from, n, eps) : 1.0f;
    for (int base = 0; base < n; base += 512) {
        float4 v[4], g[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int i = base + 128 * c + 4 * lane;
            v[c] = i < n ? *reinterpret_cast<const float4*>(from + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (w) g[c] = i < n ? *reinterpret_cast<const float4*>(w + i) : v[c];
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int i = base + 128 * c + 4 * lane;
            if (w) v[c] = make_float4((v[c].x * r) * g[c].x, (v[c].y * r) * g[c].y, (v[c].z * r) * g[c].z, (v[c].w * r) * g[c].w);
            float d;
            int sum;
            const u32 word = quantise_quad(v[c], d, sum);
            if (i < n) {
                const size_t index = (size_t)row * n + i;
                *reinterpret_cast<u32*>(xq + index) = word;
                if ((lane & 7) == 0) {
                    da[index / 32] = d;
                    sa[index / 32] = d * (float)sum;
                }
            }
        }
    }
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
