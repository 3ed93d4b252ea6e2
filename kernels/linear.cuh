// Arguments shared by the linear kernels, the epilogues, launch overlap and asynchronous copies. Layouts: kernels/README.md.
#pragma once
#include "common.cuh"

struct LinearArgs {
    const float* x;        // [rows][x_stride] activations (f32 and int8 weights)
    const void* w;         // f32 [n][k] or i8 [n][k]
    const void* scale;     // int8: f32 [n]; blocks: f16 [n][k/32]
    const void* minimum;   // blocks with a minimum: f16 [n][k/32]
    float* out;            // [rows][out_stride]
    const i8* xq;          // [rows][k] quantised activations (block weights)
    const float* da;       // [rows][k/32]
    const float* sa;       // [rows][k/32]
    i8* oq;                // [rows][out_stride] and scales: what SwiGLU gives, quantised (rows kernel of block weights); null: out
    float *oda, *osa;      // [rows][out_stride/32]
    int rows, n, k, x_stride, out_stride;
    int epilogue;          // EPILOGUE_*
};

#define EPILOGUE_STORE 0   // out[r][c] = y
#define EPILOGUE_ADD 1     // out[r][c] = out[r][c] + y
#define EPILOGUE_SWIGLU 2  // columns 2i and 2i+1 are gate and up: out[r][i] = swiglu(y[2i], y[2i+1])

#define KIND_F32 0
#define KIND_INT8 1
#define KIND_BLOCK 2
#define KIND_BLOCK_MIN 3

// A kernel launched with programmatic serialisation may start before its predecessor has ended, and before what went ahead of that one:
// nothing that a kernel of this pass wrote is read before grid_wait, which waits until every one of them has ended. What is older than
// the pass may be read at once, because its first kernel is not launched early; fused attention says what more it reads and why.
// A kernel lets its successor in early only where it is bound by latency: blocks that wait are placed unevenly, which costs a kernel
// that fills the device more than the launch that it saves.
// No kernel parameter is __restrict__: through a constant restricted pointer the compiler reads ahead of the wait.
__device__ __forceinline__ void grid_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void grid_launch_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// 16 bytes from global to shared memory, past L1; a thread waits for its own copies, a barrier follows.
__device__ __forceinline__ void copy_async16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_async4(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the last PENDING groups of this thread are there.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// What the first pair that this thread combines will be added to, asked for early in narrow tiles (those of the residual stream).
template <int BN>
__device__ __forceinline__ float2 residual(const LinearArgs& a, int n0) {
    const int r = threadIdx.x / (BN / 2), n = n0 + 2 * (threadIdx.x % (BN / 2));
    const float* out = a.out + (size_t)r * a.out_stride + n;
    const bool live = BN == 8 && a.epilogue == EPILOGUE_ADD && r < a.rows;
    return make_float2(live && n < a.n ? out[0] : 0.0f, live && n + 1 < a.n ? out[1] : 0.0f);
}

// The eight groups' sums in `parts` [8][16][PART] close into the tree; the epilogue takes pairs of outputs of one row. A block of 256
// threads; with 64 outputs a warp holds one row's.
template <int BN, int PART>
__device__ __forceinline__ void combine_groups(const LinearArgs& a, const float* parts, int n0, float2 before) {
#pragma unroll 1
    for (int i = threadIdx.x; i < a.rows * (BN / 2); i += 256) {
        const int r = i / (BN / 2), c = 2 * (i % (BN / 2)), n = n0 + c;
        float2 s[8];
#pragma unroll
        for (int g = 0; g < 8; ++g) s[g] = *reinterpret_cast<const float2*>(parts + (g * 16 + r) * PART + c);
        float y0 = ((s[0].x + s[1].x) + (s[2].x + s[3].x)) + ((s[4].x + s[5].x) + (s[6].x + s[7].x));
        float y1 = ((s[0].y + s[1].y) + (s[2].y + s[3].y)) + ((s[4].y + s[5].y) + (s[6].y + s[7].y));
#if defined(KIND) && KIND == KIND_INT8
        y0 = y0 * __ldg(static_cast<const float*>(a.scale) + min(n, a.n - 1));
        y1 = y1 * __ldg(static_cast<const float*>(a.scale) + min(n + 1, a.n - 1));
#endif
        if (BN == 64 && a.oq) {
            float d;
            int sum;
            const size_t at = (size_t)r * a.out_stride + n / 2;
            a.oq[at] = (i8)quantise_lane(swiglu(y0, y1), d, sum);
            if ((threadIdx.x & 31) == 0) a.oda[at / 32] = d, a.osa[at / 32] = d * (float)sum;
            continue;
        }
        float* out = a.out + (size_t)r * a.out_stride;
        if (a.epilogue == EPILOGUE_SWIGLU) {
            if (n < a.n) out[n / 2] = swiglu(y0, y1);
        } else {
            const bool early = BN == 8 && i == threadIdx.x, add = a.epilogue == EPILOGUE_ADD;
            if (n < a.n) out[n] = add ? (early ? before.x : out[n]) + y0 : y0;
            if (n + 1 < a.n) out[n + 1] = add ? (early ? before.y : out[n + 1]) + y1 : y1;
        }
    }
}
