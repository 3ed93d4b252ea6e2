// out[r][n] = epilogue(chain sums) for few rows with f32 or int8 weights, on f32 fused multiply-adds: the shape of decode.
//
// One block of 256 threads computes tiles of OUTS*PER outputs of at most 16 rows, those from 16 blockIdx.y on. Warp g owns group g of the
// canonical order; a lane owns PER outputs and the RL rows s, s + SETS, ... of its row set s: a weight is converted once for all its rows.
// The groups meet in shared memory.
// The first tile's weights are copied to shared memory before the wait for the predecessor, activations after it, by the warp that uses
// them. Grid: (any, blocks stride over tiles; ceil(rows/16)). Shared memory, dynamic: the launcher's FewRows::shared. KIND is a macro (f32
// or int8).
// Limits: k a multiple of 32 whose rows fit shared memory. Oracle: arith::linear_f32, arith::linear_int8.
#include "linear.cuh"

#define SIZE (KIND == KIND_F32 ? 4 : 1)

extern __shared__ __align__(16) unsigned char shared[];

// 16 components of one weight row, as floats.
__device__ __forceinline__ void weights16(const unsigned char* from, float (&f)[16]) {
#if KIND == KIND_INT8
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    const u32 w[4] = {v.x ^ 0x80808080u, v.y ^ 0x80808080u, v.z ^ 0x80808080u, v.w ^ 0x80808080u};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        f[4 * i] = biased_byte<0>(w[i]), f[4 * i + 1] = biased_byte<1>(w[i]);
        f[4 * i + 2] = biased_byte<2>(w[i]), f[4 * i + 3] = biased_byte<3>(w[i]);
    }
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float4 v = reinterpret_cast<const float4*>(from)[i];
        f[4 * i] = v.x, f[4 * i + 1] = v.y, f[4 * i + 2] = v.z, f[4 * i + 3] = v.w;
    }
#endif
}

// The 16 rows of blockIdx.y.
__device__ __forceinline__ LinearArgs chunk_of(LinearArgs a) {
    const int row0 = 16 * blockIdx.y;
    a.rows = min(16, a.rows - row0);
    a.x += (size_t)row0 * a.x_stride;
    a.out += (size_t)row0 * a.out_stride;
    return a;
}

template <int OUTS, int PER, int RL>
__device__ __forceinline__ void linear_rows(const LinearArgs& whole) {
    const LinearArgs a = chunk_of(whole);
    constexpr int BN = OUTS * PER, SETS = 32 / OUTS, ROWS = SETS * RL, PART = BN + 2;
    const int lane = threadIdx.x & 31, g = threadIdx.x >> 5, tiles = (a.n + BN - 1) / BN;
    const int span = ((a.k + 63) / 64 + 7) / 8 * 64, k0 = min(a.k, g * span), k1 = min(a.k, k0 + span);
    const int x_stride = a.k + 4, w_stride = a.k * SIZE + 16, pieces = a.k * SIZE / 16;
    float* xs = reinterpret_cast<float*>(shared);                       // [ROWS][x_stride]
    float* parts = xs + ROWS * x_stride;                                // [8][16][PART]
    unsigned char* ws = reinterpret_cast<unsigned char*>(parts + 8 * 16 * PART);  // [BN][w_stride]
    const int slot = lane % OUTS, set = lane / OUTS;
    grid_launch_next();
    auto fetch_weights = [&](int tile) {
#pragma unroll
        for (int row = g; row < BN; row += 8) {
            const i8* from = static_cast<const i8*>(a.w) + (size_t)min(tile * BN + row, a.n - 1) * a.k * SIZE;
#pragma unroll 2
            for (int piece = lane; piece < pieces; piece += 32) copy_async16(ws + row * w_stride + 16 * piece, from + 16 * piece);
        }
    };
    fetch_weights(blockIdx.x);
    grid_wait();
    const int quads = (k1 - k0) / 4;
#pragma unroll 1
    for (int row = 0; row < a.rows; ++row)
#pragma unroll 2
        for (int quad = lane; quad < quads; quad += 32)
            copy_async16(xs + row * x_stride + k0 + 4 * quad, a.x + (size_t)row * a.x_stride + k0 + 4 * quad);
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const float2 before = residual<BN>(a, tile * BN);
        copy_async_commit();
        copy_async_wait<0>();
        __syncthreads();
        float acc[PER][RL];
#pragma unroll
        for (int p = 0; p < PER; ++p)
#pragma unroll
            for (int r = 0; r < RL; ++r) acc[p][r] = 0.0f;
#pragma unroll 1
        for (int segment = k0; segment < k1; segment += 64) {
            float chain[PER][RL];
#pragma unroll
            for (int p = 0; p < PER; ++p)
#pragma unroll
                for (int r = 0; r < RL; ++r) chain[p][r] = 0.0f;
#pragma unroll 1
            for (int k = segment; k < min(segment + 64, k1); k += 16) {
                float f[PER][16];
#pragma unroll
                for (int p = 0; p < PER; ++p) weights16(ws + (slot + OUTS * p) * w_stride + k * SIZE, f[p]);
#pragma unroll
                for (int r = 0; r < RL; ++r) {
                    const float4* x = reinterpret_cast<const float4*>(xs + (set + SETS * r) * x_stride + k);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float4 v = x[i];
#pragma unroll
                        for (int p = 0; p < PER; ++p) {
                            float t = chain[p][r];
                            t = fma_(f[p][4 * i], v.x, t);
                            t = fma_(f[p][4 * i + 1], v.y, t);
                            t = fma_(f[p][4 * i + 2], v.z, t);
                            chain[p][r] = fma_(f[p][4 * i + 3], v.w, t);
                        }
                    }
                }
            }
#pragma unroll
            for (int p = 0; p < PER; ++p)
#pragma unroll
                for (int r = 0; r < RL; ++r) acc[p][r] = acc[p][r] + chain[p][r];
        }
#pragma unroll
        for (int p = 0; p < PER; ++p)
#pragma unroll
            for (int r = 0; r < RL; ++r) parts[(g * 16 + set + SETS * r) * PART + slot + OUTS * p] = acc[p][r];
        __syncthreads();
        if (tile + gridDim.x < tiles) fetch_weights(tile + gridDim.x);
        combine_groups<BN, PART>(a, parts, tile * BN, before);
    }
}

#define ROWS_KERNEL(ROWS, OUTS, PER, RL) \
    extern "C" __global__ void __launch_bounds__(256, 2) linear_rows_##ROWS(LinearArgs a) { linear_rows<OUTS, PER, RL>(a); }
ROWS_KERNEL(8_4, 8, 1, 1) ROWS_KERNEL(8_8, 8, 1, 2) ROWS_KERNEL(8_16, 8, 1, 4)
ROWS_KERNEL(32_4, 16, 2, 2) ROWS_KERNEL(32_8, 16, 2, 4) ROWS_KERNEL(32_16, 16, 2, 8)
