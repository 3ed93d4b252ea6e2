// out[r][n] = epilogue(sum over blocks) for at most 16 rows with block weights, on int8 tensor cores: the shape of decode.
//
// One block of 256 threads computes 16 rows x 8*TILES outputs. Warp g owns group g of the canonical order: one mma m16n8k32 a block of 32
// and tile of 8 outputs gives the exact integer sums, g = fma(f32(isum), dw*da, g) follows; the groups meet in shared memory.
// Weights and their scales are constants: they are copied to shared memory before the wait for the predecessor, activations after it.
// Within a block of 32 the tensor core sees the inputs in another order than memory holds them, the same for both operands (exact sums).
// With oq the epilogue of gate and up quantises: a warp then holds the 32 outputs of one activation block.
// Grid: ceil(n/(8*TILES)). Shared memory, dynamic: rows_q8_bytes of the launcher. KIND is a macro (block, with or without a minimum).
// Limits: k a multiple of 32 whose rows fit shared memory. Oracle: arith::linear_q8.
#include "linear.cuh"

#define MINIMUM (KIND == KIND_BLOCK_MIN)
#define ROWS 16

extern __shared__ __align__(16) unsigned char shared[];

__device__ __forceinline__ void mma_s8(int (&c)[4], uint2 a0, uint2 a1, uint2 b) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a0.x), "r"(a1.x), "r"(a0.y), "r"(a1.y), "r"(b.x), "r"(b.y));
}

template <int TILES>
__device__ __forceinline__ void linear_rows(const LinearArgs& a) {
    constexpr int BN = 8 * TILES, SCALES = BN + 2, PART = BN + 2;
    const int blocks = a.k / 32, stride = (a.k + 127) / 128 * 128 + 32, rows_stride = blocks | 1, pieces = a.k / 16;
    const int n0 = blockIdx.x * BN, lane = threadIdx.x & 31, g = threadIdx.x >> 5;
    constexpr int PART_BYTES = 8 * ROWS * PART * 4;
    unsigned char* xs = shared;                                              // [16][stride]
    unsigned char* ws = xs + ROWS * stride;                                  // [BN][stride]
    float* parts = reinterpret_cast<float*>(ws);                             // [8][16][PART], once the weights are used
    float* dw = reinterpret_cast<float*>(ws + max(BN * stride, PART_BYTES));  // [blocks][SCALES]
    float* mw = dw + blocks * SCALES;                                        // the same with a minimum
    float* da = mw + (MINIMUM ? blocks * SCALES : 0);                        // [16][rows_stride]
    float* sa = da + ROWS * rows_stride;                                     // the same with a minimum
    grid_launch_next();
#pragma unroll 4
    for (int i = threadIdx.x; i < BN * pieces; i += 256) {
        const int row = i / pieces, piece = i - row * pieces;
        copy_async16(ws + row * stride + 16 * piece, static_cast<const i8*>(a.w) + (size_t)min(n0 + row, a.n - 1) * a.k + 16 * piece);
    }
#pragma unroll 2
    for (int i = threadIdx.x; i < BN * blocks; i += 256) {
        const int row = i / blocks, block = i - row * blocks;
        const size_t from = (size_t)min(n0 + row, a.n - 1) * blocks + block;
        dw[block * SCALES + row] = half_to_float(__ldg(static_cast<const u16*>(a.scale) + from));
        if (MINIMUM) mw[block * SCALES + row] = half_to_float(__ldg(static_cast<const u16*>(a.minimum) + from));
    }
    grid_wait();
#pragma unroll 4
    for (int i = threadIdx.x; i < a.rows * pieces; i += 256) {
        const int row = i / pieces, piece = i - row * pieces;
        copy_async16(xs + row * stride + 16 * piece, a.xq + (size_t)row * a.k + 16 * piece);
    }
#pragma unroll 2
    for (int i = threadIdx.x; i < a.rows * blocks; i += 256) {
        const int row = i / blocks, block = i - row * blocks;
        da[row * rows_stride + block] = a.da[i];
        if (MINIMUM) sa[row * rows_stride + block] = a.sa[i];
    }
    copy_async_wait();
    __syncthreads();

    // Rows past the last one hold anything: no sum crosses rows, and they are not stored.
    const int row = lane >> 2, quad = lane & 3, per_group = (blocks + 7) / 8;
    float acc[TILES][4];
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[t][e] = 0.0f;
#pragma unroll 1
    for (int b = g * per_group; b < min(blocks, (g + 1) * per_group); ++b) {
        const unsigned char* x = xs + row * stride + 32 * b + 8 * quad;
        const uint2 a0 = *reinterpret_cast<const uint2*>(x), a1 = *reinterpret_cast<const uint2*>(x + 8 * stride);
        const float d0 = da[row * rows_stride + b], d1 = da[(row + 8) * rows_stride + b];
        float s0 = 0.0f, s1 = 0.0f;
        if (MINIMUM) s0 = sa[row * rows_stride + b], s1 = sa[(row + 8) * rows_stride + b];
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            const uint2 w = *reinterpret_cast<const uint2*>(ws + (8 * t + row) * stride + 32 * b + 8 * quad);
            const float2 d = *reinterpret_cast<const float2*>(dw + b * SCALES + 8 * t + 2 * quad);
            int c[4] = {INT_BIAS, INT_BIAS, INT_BIAS, INT_BIAS};
            mma_s8(c, a0, a1, w);
            acc[t][0] = fma_(biased_to_float(c[0]), d.x * d0, acc[t][0]);
            acc[t][1] = fma_(biased_to_float(c[1]), d.y * d0, acc[t][1]);
            acc[t][2] = fma_(biased_to_float(c[2]), d.x * d1, acc[t][2]);
            acc[t][3] = fma_(biased_to_float(c[3]), d.y * d1, acc[t][3]);
            if (MINIMUM) {
                const float2 m = *reinterpret_cast<const float2*>(mw + b * SCALES + 8 * t + 2 * quad);
                acc[t][0] = fma_(m.x, s0, acc[t][0]);
                acc[t][1] = fma_(m.y, s0, acc[t][1]);
                acc[t][2] = fma_(m.x, s1, acc[t][2]);
                acc[t][3] = fma_(m.y, s1, acc[t][3]);
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        float* to = parts + (g * ROWS + row) * PART + 8 * t + 2 * quad;
        *reinterpret_cast<float2*>(to) = make_float2(acc[t][0], acc[t][1]);
        *reinterpret_cast<float2*>(to + 8 * PART) = make_float2(acc[t][2], acc[t][3]);
    }
    __syncthreads();
    combine_groups<BN, PART>(a, parts, n0);
}

extern "C" __global__ void __launch_bounds__(256, 2) linear_rows_8(LinearArgs a) { linear_rows<1>(a); }
extern "C" __global__ void __launch_bounds__(256, 2) linear_rows_64(LinearArgs a) { linear_rows<8>(a); }
