// out[r][n] = epilogue(sum over blocks) for few rows with block weights, on int8 tensor cores: the shape of decode.
//
// One block of 256 threads computes 16 rows x 8*TILES outputs; the blocks of blockIdx.y take rows 16 y and on. Warp g owns group g of the
// canonical order: one mma m16n8k32 a block of 32 and tile of 8 outputs gives the exact integer sums, g = fma(f32(isum), dw*da, g)
// follows; the groups meet in shared memory.
// Weights and their scales are constants: they are copied to shared memory before the wait for the predecessor, activations after it.
// In the kernels _norm every block normalises and quantises its rows of x itself: for few rows that is sooner done than a kernel more.
// Within a block of 32 the tensor core sees the inputs in another order than memory holds them, the same for both operands (exact sums).
// With oq the epilogue of gate and up quantises: a warp then holds the 32 outputs of one activation block.
// Grid: (ceil(n/(8*TILES)), or fewer with two buffers; ceil(rows/16)). Shared memory, dynamic: the launcher's FewRows::shared. KIND is a
// macro (block, with or without a minimum).
// Limits: k a multiple of 32 whose rows fit shared memory; _norm: k at most 256*HELD. Oracle: arith::linear_q8; _norm: arith::rms_norm and
// arith::quantise_activations before it.
#include "linear.cuh"

#define MINIMUM (KIND == KIND_BLOCK_MIN)
#define ROWS 16

extern __shared__ __align__(16) unsigned char shared[];

__device__ __forceinline__ void mma_s8(int (&c)[4], uint2 a0, uint2 a1, uint2 b) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a0.x), "r"(a1.x), "r"(a0.y), "r"(a1.y), "r"(b.x), "r"(b.y));
}

// The scales of one tile: a lane holds those of block `lane` (+ 32 c) for a warp's TILES outputs g, g + 8, ...
template <int TILES>
struct Scales {
    u16 d[TILES], m[TILES];
    __device__ __forceinline__ void load(const LinearArgs& a, int n, int block, int blocks) {
        if (block >= blocks) return;
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            const size_t from = (size_t)min(n + 8 * t, a.n - 1) * blocks + block;
            d[t] = __ldg(static_cast<const u16*>(a.scale) + from);
            if (MINIMUM) m[t] = __ldg(static_cast<const u16*>(a.minimum) + from);
        }
    }
    // dw and mw are [blocks][8 * TILES + 2] floats.
    __device__ __forceinline__ void store(float* dw, float* mw, int g, int block, int blocks) const {
        if (block >= blocks) return;
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            dw[block * (8 * TILES + 2) + g + 8 * t] = half_to_float(d[t]);
            if (MINIMUM) mw[block * (8 * TILES + 2) + g + 8 * t] = half_to_float(m[t]);
        }
    }
};

#define HELD 4  // values of a row that a thread holds: normalised rows have at most 256 * HELD

struct NormArgs {
    const float* weights;  // [k]
    const u32* gather;     // the rows of x, null: 0, 1, ...
    float eps;
};

// What a thread keeps for the norm of its block's rows: r = 1/sqrt(mean(x^2) + eps) in the order of arith::rms_norm, then q, d and d*sum
// of each block of 32 (arith::quantise_activations); a warp's 32 lanes hold one block.
struct Norm {
    float weights[HELD];
    __device__ __forceinline__ void load_weights(const NormArgs& norm, int k) {
#pragma unroll
        for (int c = 0; c < HELD; ++c) {
            const int i = threadIdx.x + 256 * c;
            weights[c] = i < k ? __ldg(norm.weights + i) : 0.0f;
        }
    }
    __device__ __forceinline__ void rows(const LinearArgs& a, const NormArgs& norm, unsigned char* xs, int stride, float* da,
                                         float* sa, int rows_stride) const {
        __shared__ float sums[ROWS][8];
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row0 = ROWS * blockIdx.y;
#pragma unroll 1
        for (int row = 0; row < a.rows; ++row) {
            const float* from = a.x + (size_t)(norm.gather ? norm.gather[row0 + row] : row0 + row) * a.x_stride;
            float held[HELD], part = 0.0f;
#pragma unroll
            for (int c = 0; c < HELD; ++c) held[c] = threadIdx.x + 256 * c < a.k ? from[threadIdx.x + 256 * c] : 0.0f;
#pragma unroll
            for (int c = 0; c < HELD; ++c)
                if (threadIdx.x + 256 * c < a.k) part = fma_(held[c], held[c], part);
            part = tree32(part);
            if (lane == 0) sums[row][warp] = part;
            __syncthreads();
            const float r = __fdiv_rn(1.0f, __fsqrt_rn(__fdiv_rn(combine_parts(sums[row]), (float)a.k) + norm.eps));
#pragma unroll
            for (int c = 0; c < HELD; ++c) {
                const int i = threadIdx.x + 256 * c;
                if (i >= a.k) break;
                float d;
                int sum;
                xs[row * stride + i] = (unsigned char)(i8)quantise_lane((held[c] * r) * weights[c], d, sum);
                if (lane == 0) {
                    da[row * rows_stride + i / 32] = d;
                    if (MINIMUM) sa[row * rows_stride + i / 32] = d * (float)sum;
                }
            }
        }
    }
};

// The 16 rows of blockIdx.y.
__device__ __forceinline__ LinearArgs chunk_of(LinearArgs a) {
    const int row0 = ROWS * blockIdx.y;
    const size_t blocks = (size_t)row0 * (a.k / 32), out = (size_t)row0 * a.out_stride;
    a.rows = min(ROWS, a.rows - row0);
    a.xq += (size_t)row0 * a.k, a.da += blocks, a.sa += blocks;
    a.out += out;
    if (a.oq) a.oq += out, a.oda += out / 32, a.osa += out / 32;
    return a;
}

// BUFFERS 1: a block computes one tile and its sums take the weights' place. BUFFERS 2: blocks stride over tiles and fetch the next one
// while they compute; k is at most 1024.
template <int TILES, int BUFFERS, bool NORMALISES>
__device__ __forceinline__ void linear_rows(const LinearArgs& whole, const NormArgs& norm) {
    const LinearArgs a = chunk_of(whole);
    constexpr int BN = 8 * TILES, SCALES = BN + 2, PART = BN + 2, PART_BYTES = 8 * ROWS * PART * 4;
    const int blocks = a.k / 32, stride = (a.k + 127) / 128 * 128 + 32, rows_stride = blocks | 1, pieces = a.k / 16;
    const int lane = threadIdx.x & 31, g = threadIdx.x >> 5, tiles = (a.n + BN - 1) / BN;
    const int buffer_bytes = BUFFERS == 1 ? max(BN * stride, PART_BYTES) : BN * stride;
    unsigned char* xs = shared;                                              // [16][stride]
    unsigned char* ws = xs + ROWS * stride;                                  // [BUFFERS][BN][stride]
    unsigned char* after = ws + BUFFERS * buffer_bytes;
    float* parts = reinterpret_cast<float*>(BUFFERS == 1 ? ws : after);      // [8][16][PART]
    float* dw = reinterpret_cast<float*>(BUFFERS == 1 ? after : after + PART_BYTES);  // [blocks][SCALES]
    float* mw = dw + blocks * SCALES;                                        // the same with a minimum
    float* da = mw + (MINIMUM ? blocks * SCALES : 0);                        // [16][rows_stride]
    float* sa = da + ROWS * rows_stride;                                     // the same with a minimum
    Scales<TILES> scales;
    // A warp copies whole rows.
    auto fetch_weights = [&](int tile, int buffer) {
#pragma unroll 1
        for (int t = 0; t < TILES; ++t) {
            const int row = g + 8 * t;
            const i8* from = static_cast<const i8*>(a.w) + (size_t)min(tile * BN + row, a.n - 1) * a.k;
            unsigned char* to = ws + buffer * buffer_bytes + row * stride;
#pragma unroll 2
            for (int piece = lane; piece < pieces; piece += 32) copy_async16(to + 16 * piece, from + 16 * piece);
        }
        copy_async_commit();
    };
    auto fetch_rows = [&]() {
#pragma unroll 1
        for (int row = g; row < a.rows; row += 8) {
#pragma unroll 2
            for (int piece = lane; piece < pieces; piece += 32)
                copy_async16(xs + row * stride + 16 * piece, a.xq + (size_t)row * a.k + 16 * piece);
#pragma unroll 2
            for (int block = lane; block < blocks; block += 32) {
                copy_async4(da + row * rows_stride + block, a.da + row * blocks + block);
                if (MINIMUM) copy_async4(sa + row * rows_stride + block, a.sa + row * blocks + block);
            }
        }
    };
    grid_launch_next();
    fetch_weights(blockIdx.x, 0);
    scales.load(a, blockIdx.x * BN + g, lane, blocks);
    scales.store(dw, mw, g, lane, blocks);
#pragma unroll 1
    for (int block = lane + 32; block < blocks; block += 32) {
        scales.load(a, blockIdx.x * BN + g, block, blocks);
        scales.store(dw, mw, g, block, blocks);
    }
    Norm held;
    if (NORMALISES) held.load_weights(norm, a.k);
    grid_wait();
    const float2 before = residual<BN>(a, blockIdx.x * BN);
    if (NORMALISES) held.rows(a, norm, xs, stride, da, sa, rows_stride);
    else fetch_rows();
    copy_async_commit();

    // Rows past the last one hold anything: no sum crosses rows, and they are not stored.
    const int row = lane >> 2, quad = lane & 3, per_group = (blocks + 7) / 8;
    int buffer = 0;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int next = tile + gridDim.x;
        if (BUFFERS == 2 && next < tiles) {
            fetch_weights(next, buffer ^ 1);
            scales.load(a, next * BN + g, lane, blocks);
            copy_async_wait<1>();
        } else {
            copy_async_wait<0>();
        }
        __syncthreads();
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
                const uint2 w =
                    *reinterpret_cast<const uint2*>(ws + buffer * buffer_bytes + (8 * t + row) * stride + 32 * b + 8 * quad);
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
        if (BUFFERS == 1) __syncthreads();
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            float* to = parts + (g * ROWS + row) * PART + 8 * t + 2 * quad;
            *reinterpret_cast<float2*>(to) = make_float2(acc[t][0], acc[t][1]);
            *reinterpret_cast<float2*>(to + 8 * PART) = make_float2(acc[t][2], acc[t][3]);
        }
        __syncthreads();
        if (BUFFERS == 2 && next < tiles) scales.store(dw, mw, g, lane, blocks);
        combine_groups<BN, PART>(a, parts, tile * BN, BUFFERS == 1 ? before : residual<BN>(a, tile * BN));
        buffer ^= 1;
    }
}

struct NormedArgs {
    LinearArgs linear;
    NormArgs norm;
};

#define ROWS_KERNEL(NAME, TILES, BUFFERS, PER_SM)                                                              \
    extern "C" __global__ void __launch_bounds__(256, PER_SM) NAME(LinearArgs a) {                             \
        linear_rows<TILES, BUFFERS, false>(a, NormArgs());                                                     \
    }                                                                                                          \
    extern "C" __global__ void __launch_bounds__(256, PER_SM) NAME##_norm(NormedArgs a) {                      \
        linear_rows<TILES, BUFFERS, true>(a.linear, a.norm);                                                   \
    }
ROWS_KERNEL(linear_rows_8, 1, 1, 2) ROWS_KERNEL(linear_rows_64, 8, 1, 2) ROWS_KERNEL(linear_rows_64_ahead, 8, 2, 1)
