// Arguments shared by the two linear kernels, and the epilogues. Layouts: docs in kernels/README.md.
#pragma once
#include "common.cuh"

struct LinearArgs {
    const float* x;        // [*][x_stride] activations (small kernel; f32 and int8 tiles)
    const u32* gather;     // row r reads x[gather[r]]; null: x[r]
    const float* norm;     // [k] RMSNorm weight folded into the small kernel; null: none
    const void* w;         // f32 [n][k] or i8 [n][k]
    const void* scale;     // int8: f32 [n]; blocks: f16 [n][k/32]
    const void* minimum;   // blocks with a minimum: f16 [n][k/32]
    float* out;            // [rows][out_stride]
    const i8* xq;          // [rows][k] quantised activations (block tiles)
    const float* da;       // [rows][k/32]
    const float* sa;       // [rows][k/32]
    float eps;
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

// A kernel launched with programmatic serialisation may start before its predecessor has ended: nothing that a predecessor wrote is
// read before grid_wait. A kernel lets its successor in early only where it is bound by latency: blocks that wait are placed unevenly,
// which costs a kernel that fills the device more than the launch that it saves.
__device__ __forceinline__ void grid_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void grid_launch_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
