// out[r][n] = epilogue(sum over blocks) for many rows with block weights, on int8 tensor cores (mma.sync m16n8k32).
//
// One block of 128 threads computes 64 rows x 64 outputs; each of its four warps 32 x 32. The exact integer sum of a block of 32 leaves the
// tensor core once per block; g = fma(f32(isum), dw*da, g) follows in the canonical order, groups close into the tree as they end.
// Activations and weights are staged two blocks (64 bytes a row, padded to 80) at a time by cp.async, four stages deep.
// Grid: (ceil(n/64), ceil(rows/64)). Shared memory: static. k is a multiple of 32. MINIMUM is a macro. Oracle: arith::linear_q8.
#include "linear.cuh"

#define BM 64
#define BN 64
#define STAGES 4
#define ROW_BYTES 80

struct Stage {
    unsigned char a[BM * ROW_BYTES];
    unsigned char b[BN * ROW_BYTES];
    float da[2][BM], sa[2][BM];
    float dw[2][BN], mw[2][BN];
};

__device__ __forceinline__ void copy16(void* to, const void* from, bool live) {
    const u32 address = (u32)__cvta_generic_to_shared(to);
    const int bytes = live ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes));
}

__device__ __forceinline__ void load_matrix4(u32 (&r)[4], const void* from) {
    const u32 address = (u32)__cvta_generic_to_shared(from);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ __forceinline__ void mma_s8(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The two scales that one thread carries from global to shared memory for a stage: row (or output) threadIdx.x / 2, block parity.
struct Carried {
    float da, sa, dw, mw;
};

__device__ __forceinline__ Carried fetch_scales(const LinearArgs& a, int row0, int col0, int chunk) {
    const int blocks = a.k / 32, block = 2 * chunk + (threadIdx.x & 1);
    const int row = row0 + (threadIdx.x >> 1), col = col0 + (threadIdx.x >> 1);
    Carried c = {0.0f, 0.0f, 0.0f, 0.0f};
    if (block < blocks && row < a.rows) {
        c.da = a.da[(size_t)row * blocks + block];
        if (MINIMUM) c.sa = a.sa[(size_t)row * blocks + block];
    }
    if (block < blocks && col < a.n) {
        c.dw = half_to_float(__ldg(static_cast<const u16*>(a.scale) + (size_t)col * blocks + block));
        if (MINIMUM) c.mw = half_to_float(__ldg(static_cast<const u16*>(a.minimum) + (size_t)col * blocks + block));
    }
    return c;
}

__device__ __forceinline__ void store_scales(Stage& s, const Carried& c) {
    const int parity = threadIdx.x & 1, i = threadIdx.x >> 1;
    s.da[parity][i] = c.da;
    s.dw[parity][i] = c.dw;
    if (MINIMUM) {
        s.sa[parity][i] = c.sa;
        s.mw[parity][i] = c.mw;
    }
}

__device__ __forceinline__ void fetch_tiles(const LinearArgs& a, Stage& s, int row0, int col0, int chunk) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int piece = threadIdx.x + 128 * i, row = piece >> 2, byte = (piece & 3) * 16, k = chunk * 64 + byte;
        const bool live_a = row0 + row < a.rows && k < a.k, live_b = col0 + row < a.n && k < a.k;
        copy16(s.a + row * ROW_BYTES + byte, live_a ? a.xq + (size_t)(row0 + row) * a.k + k : a.xq, live_a);
        copy16(s.b + row * ROW_BYTES + byte,
               live_b ? static_cast<const i8*>(a.w) + (size_t)(col0 + row) * a.k + k : static_cast<const i8*>(a.w), live_b);
    }
}

extern "C" __global__ void __launch_bounds__(128, 2) linear_tile_q8(LinearArgs a) {
    __shared__ __align__(16) Stage stages[STAGES];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wm = (warp & 1) * 32, wn = (warp >> 1) * 32;
    const int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;
    const int blocks = a.k / 32, chunks = (blocks + 1) / 2, per_group = (blocks + 7) / 8;
    float acc[2][4][4];
    GroupTree tree[2][4][4];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[i][j][e] = 0.0f, tree[i][j][e] = {0.0f, 0.0f, 0.0f};
    grid_wait();
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        if (i < chunks) {
            fetch_tiles(a, stages[i], row0, col0, i);
            store_scales(stages[i], fetch_scales(a, row0, col0, i));
        }
        asm volatile("cp.async.commit_group;");
    }
    int group = 0, left = per_group;
    // Scales wait in registers for one chunk more than the tiles' copies are issued ahead: their loads are never waited for.
    Carried pending = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int chunk = 0; chunk < chunks; ++chunk) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
        __syncthreads();
        const int ahead = chunk + STAGES - 1;
        const Carried stored = pending;
        if (ahead < chunks) {
            fetch_tiles(a, stages[ahead % STAGES], row0, col0, ahead);
            pending = fetch_scales(a, row0, col0, ahead);
        }
        asm volatile("cp.async.commit_group;");
        const Stage& s = stages[chunk % STAGES];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (2 * chunk + half < blocks) {
                u32 fa[2][4], fb[2][4];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    // Matrices 0,1 are rows 0-7 and 8-15 of the first 16 bytes, 2,3 the same rows of the second.
                    load_matrix4(fa[i], s.a + (wm + 16 * i + (lane & 15)) * ROW_BYTES + half * 32 + (lane >> 4) * 16);
                    // Two groups of eight outputs: their first and second 16 bytes.
                    load_matrix4(fb[i], s.b + (wn + 16 * i + (lane & 7) + (lane >> 4) * 8) * ROW_BYTES + half * 32 +
                                            ((lane >> 3) & 1) * 16);
                }
                float da[2][2], sa[2][2];
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        da[i][h] = s.da[half][wm + 16 * i + 8 * h + (lane >> 2)];
                        if (MINIMUM) sa[i][h] = s.sa[half][wm + 16 * i + 8 * h + (lane >> 2)];
                    }
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float2 dw = *reinterpret_cast<const float2*>(&s.dw[half][wn + 8 * j + 2 * (lane & 3)]);
                    float2 mw = make_float2(0.0f, 0.0f);
                    if (MINIMUM) mw = *reinterpret_cast<const float2*>(&s.mw[half][wn + 8 * j + 2 * (lane & 3)]);
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        int c[4] = {INT_BIAS, INT_BIAS, INT_BIAS, INT_BIAS};
                        mma_s8(c, fa[i], fb[j >> 1][2 * (j & 1)], fb[j >> 1][2 * (j & 1) + 1]);
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const float d = (e & 1 ? dw.y : dw.x) * da[i][e >> 1];
                            acc[i][j][e] = fma_(biased_to_float(c[e]), d, acc[i][j][e]);
                            if (MINIMUM) acc[i][j][e] = fma_(e & 1 ? mw.y : mw.x, sa[i][e >> 1], acc[i][j][e]);
                        }
                    }
                }
                if (--left == 0) {
#pragma unroll
                    for (int i = 0; i < 2; ++i)
#pragma unroll
                        for (int j = 0; j < 4; ++j)
#pragma unroll
                            for (int e = 0; e < 4; ++e) {
                                group_push(tree[i][j][e], group, acc[i][j][e]);
                                acc[i][j][e] = 0.0f;
                            }
                    ++group;
                    left = per_group;
                }
            }
        }
        if (chunk > 0 && ahead - 1 < chunks) store_scales(stages[(ahead - 1) % STAGES], stored);
    }
    grid_launch_next();
    // Groups that did not fill, then the empty ones (+0).
#pragma unroll 1
    for (; group < 8; ++group)
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    group_push(tree[i][j][e], group, acc[i][j][e]);
                    acc[i][j][e] = 0.0f;
                }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = row0 + wm + 16 * i + 8 * h + (lane >> 2);
            if (row >= a.rows) continue;
            float* out = a.out + (size_t)row * a.out_stride;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int col = col0 + wn + 8 * j + 2 * (lane & 3);
                const float y0 = tree[i][j][2 * h].q, y1 = tree[i][j][2 * h + 1].q;
                if (a.epilogue == EPILOGUE_SWIGLU) {
                    if (col < a.n) out[col / 2] = swiglu(y0, y1);
                } else {
                    if (col < a.n) out[col] = a.epilogue == EPILOGUE_ADD ? out[col] + y0 : y0;
                    if (col + 1 < a.n) out[col + 1] = a.epilogue == EPILOGUE_ADD ? out[col + 1] + y1 : y1;
                }
            }
        }
}
