// out[r][n] = epilogue(chain sums) for many rows with f32 or int8 weights, on f32 fused multiply-adds in registers.
//
// One block of 256 threads computes 16*TM rows x 64 outputs; a thread owns TM x 4 of them: the chain of its segment, the group's sum and
// the three open nodes of the group tree. 16 components of rows and weights are staged at a time, transposed, double buffered.
// Grid: (ceil(n/64), ceil(rows/(16*TM))). Shared memory: static. k is a multiple of 32. KIND is a macro (f32 or int8).
// Oracle: arith::linear_f32, arith::linear_int8.
#include "linear.cuh"

#define BN 64
#define BK 16

// Four components k..k+3 of one weight row as floats.
__device__ __forceinline__ float4 weights4(const LinearArgs& a, int col, int k) {
    if (col >= a.n || k >= a.k) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#if KIND == KIND_INT8
    const u32 word = __ldg(reinterpret_cast<const u32*>(static_cast<const i8*>(a.w) + (size_t)col * a.k + k)) ^ 0x80808080u;
    return make_float4(biased_byte<0>(word), biased_byte<1>(word), biased_byte<2>(word), biased_byte<3>(word));
#else
    return __ldg(reinterpret_cast<const float4*>(static_cast<const float*>(a.w) + (size_t)col * a.k + k));
#endif
}

template <int TM>
__device__ __forceinline__ void linear_tile(const LinearArgs& a) {
    constexpr int BM = 16 * TM, PAD = 4, A_QUADS = BM * BK / 4 / 256;
    __shared__ __align__(16) float xs[2][BK][BM + PAD], ws[2][BK][BN + PAD];
    const int tx = threadIdx.x & 15, ty = threadIdx.x >> 4;
    const int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;
    float chain[TM][4], acc[TM][4];
    GroupTree tree[TM][4];
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) chain[i][j] = acc[i][j] = 0.0f, tree[i][j] = {0.0f, 0.0f, 0.0f};

    const int lr = threadIdx.x >> 2, lk = 4 * (threadIdx.x & 3);
    float4 xa[A_QUADS], wa;
    grid_wait();
    auto fetch = [&](int k) {
#pragma unroll
        for (int i = 0; i < A_QUADS; ++i) {
            const int row = row0 + lr + 64 * i;
            xa[i] = row < a.rows && k + lk < a.k
                        ? *reinterpret_cast<const float4*>(a.x + (size_t)row * a.x_stride + k + lk)
                        : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        wa = weights4(a, col0 + lr, k + lk);
    };
    auto stage = [&](int buffer) {
#pragma unroll
        for (int i = 0; i < A_QUADS; ++i) {
            xs[buffer][lk][lr + 64 * i] = xa[i].x, xs[buffer][lk + 1][lr + 64 * i] = xa[i].y;
            xs[buffer][lk + 2][lr + 64 * i] = xa[i].z, xs[buffer][lk + 3][lr + 64 * i] = xa[i].w;
        }
        ws[buffer][lk][lr] = wa.x, ws[buffer][lk + 1][lr] = wa.y, ws[buffer][lk + 2][lr] = wa.z, ws[buffer][lk + 3][lr] = wa.w;
    };
    const int per_group = ((a.k + 63) / 64 + 7) / 8;
    int group = 0, left = per_group, buffer = 0;
    fetch(0);
    stage(0);
    __syncthreads();
    for (int k = 0; k < a.k; k += BK, buffer ^= 1) {
        const bool more = k + BK < a.k;
        if (more) fetch(k + BK);
#pragma unroll
        for (int kk = 0; kk < BK; ++kk) {
            float x[TM];
#pragma unroll
            for (int i = 0; i < TM; i += 4) {
                const float4 v = *reinterpret_cast<const float4*>(&xs[buffer][kk][ty * 4 + 64 * (i / 4)]);
                x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
            }
            const float4 w = *reinterpret_cast<const float4*>(&ws[buffer][kk][tx * 4]);
#pragma unroll
            for (int i = 0; i < TM; ++i) {
                chain[i][0] = fma_(w.x, x[i], chain[i][0]);
                chain[i][1] = fma_(w.y, x[i], chain[i][1]);
                chain[i][2] = fma_(w.z, x[i], chain[i][2]);
                chain[i][3] = fma_(w.w, x[i], chain[i][3]);
            }
        }
        if ((k + BK) % 64 == 0 || !more) {
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[i][j] = acc[i][j] + chain[i][j], chain[i][j] = 0.0f;
            if (--left == 0) {
#pragma unroll
                for (int i = 0; i < TM; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) group_push(tree[i][j], group, acc[i][j]), acc[i][j] = 0.0f;
                ++group;
                left = per_group;
            }
        }
        if (more) stage(buffer ^ 1);
        __syncthreads();
    }
    grid_launch_next();
#pragma unroll 1
    for (; group < 8; ++group)
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) group_push(tree[i][j], group, acc[i][j]), acc[i][j] = 0.0f;

    const int col = col0 + 4 * tx;
    float scale[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    if (KIND == KIND_INT8)
#pragma unroll
        for (int j = 0; j < 4; ++j) scale[j] = col + j < a.n ? __ldg(static_cast<const float*>(a.scale) + col + j) : 0.0f;
#pragma unroll
    for (int i = 0; i < TM; ++i) {
        const int row = row0 + 4 * ty + 64 * (i / 4) + (i & 3);
        if (row >= a.rows) continue;
        float* out = a.out + (size_t)row * a.out_stride;
        float y[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) y[j] = KIND == KIND_INT8 ? tree[i][j].q * scale[j] : tree[i][j].q;
        if (a.epilogue == EPILOGUE_SWIGLU) {
            if (col < a.n) out[col / 2] = swiglu(y[0], y[1]);
            if (col + 2 < a.n) out[col / 2 + 1] = swiglu(y[2], y[3]);
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (col + j < a.n) out[col + j] = a.epilogue == EPILOGUE_ADD ? out[col + j] + y[j] : y[j];
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) linear_tile_f32_4(LinearArgs a) { linear_tile<4>(a); }
extern "C" __global__ void __launch_bounds__(256) linear_tile_f32_8(LinearArgs a) { linear_tile<8>(a); }
