// out[r][n] = epilogue(sum over k of x[r][k] * w[n][k]) for at most 16 rows: the shape of decode, bound by the weights' bandwidth.
//
// Optional prologue: gather, RMSNorm and, for block weights, quantisation of the activations, repeated by every block in shared
// memory (a launch costs more). Eight lanes own the eight groups of one output; the warp's other 24 lanes own three (or, with two
// outputs a lane, six) more outputs. The group tree is three xor shuffles.
// Grid: any, blocks stride over tiles of 4*NPT outputs a warp. Block: 64..256 threads. Shared memory, dynamic, RB rows of eight
// padded groups: f32 and int8 8*(64*spg + 4)*4 bytes, blocks 8*(32*bpg + 16) bytes + 4*k/32 (8*k/32 with a minimum).
// k is a multiple of 32. KIND is a macro: one module per weight format. Oracle: arith::linear_*.
#include "linear.cuh"

#define BLOCKS (KIND >= KIND_BLOCK)

extern __shared__ __align__(16) unsigned char shared[];

template <int RB>
struct Shared {
    int stride;  // bytes (blocks) or floats of one row
    int span;    // components of one group
    i8* q;
    float *x, *da, *sa;
    __device__ Shared(int k) {
        if (BLOCKS) {
            const int per_group = (k / 32 + 7) / 8;
            span = per_group * 32;
            stride = 8 * (span + 16);
            q = reinterpret_cast<i8*>(shared);
            da = reinterpret_cast<float*>(shared + RB * stride);
            sa = da + RB * (k / 32);
        } else {
            span = ((k + 63) / 64 + 7) / 8 * 64;
            stride = 8 * (span + 4);
            x = reinterpret_cast<float*>(shared);
        }
    }
};

// Loads, normalises and quantises the rows into shared memory.
template <int RB>
__device__ __forceinline__ void load_rows(const LinearArgs& a, Shared<RB>& s) {
    __shared__ float scale[RB];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    if (a.norm) {
        for (int r = warp; r < a.rows; r += warps) {
            const float v = rms_scale(a.x + (size_t)(a.gather ? a.gather[r] : r) * a.x_stride, a.k, a.eps);
            if (lane == 0) scale[r] = v;
        }
        __syncthreads();
    }
    const int quads = a.k / 4;
#pragma unroll 1
    for (int r = 0; r < RB; ++r) {
        const float* from = a.x + (size_t)(r < a.rows ? (a.gather ? a.gather[r] : r) : 0) * a.x_stride;
        const float f = a.norm && r < a.rows ? scale[r] : 1.0f;
        for (int base = warp * 32; base < quads; base += warps * 32) {
            const int quad = base + lane, i = 4 * quad;
            const bool inside = quad < quads;
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (inside && r < a.rows) {
                v = *reinterpret_cast<const float4*>(from + i);
                if (a.norm) {
                    const float4 g = *reinterpret_cast<const float4*>(a.norm + i);
                    v = make_float4((v.x * f) * g.x, (v.y * f) * g.y, (v.z * f) * g.z, (v.w * f) * g.w);
                }
            }
            if (BLOCKS) {
                float d;
                int sum;
                const u32 word = quantise_quad(v, d, sum);
                if (inside) {
                    *reinterpret_cast<u32*>(s.q + r * s.stride + i + 16 * (i / s.span)) = word;
                    if ((lane & 7) == 0) {
                        s.da[r * (a.k / 32) + i / 32] = d;
                        if (KIND == KIND_BLOCK_MIN) s.sa[r * (a.k / 32) + i / 32] = d * (float)sum;
                    }
                }
            } else if (inside) {
                *reinterpret_cast<float4*>(s.x + r * s.stride + i + 4 * (i / s.span)) = v;
            }
        }
    }
    __syncthreads();
}

#if KIND == KIND_INT8
// 16 weights of one output as loaded.
struct Piece {
    uint4 words;
    __device__ void load(const LinearArgs& a, int row, int k) {
        words = __ldg(reinterpret_cast<const uint4*>(static_cast<const i8*>(a.w) + (size_t)row * a.k + k));
    }
    __device__ void floats(float (&f)[16]) const {
        const u32 w[4] = {words.x ^ 0x80808080u, words.y ^ 0x80808080u, words.z ^ 0x80808080u, words.w ^ 0x80808080u};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            f[4 * i] = biased_byte<0>(w[i]), f[4 * i + 1] = biased_byte<1>(w[i]);
            f[4 * i + 2] = biased_byte<2>(w[i]), f[4 * i + 3] = biased_byte<3>(w[i]);
        }
    }
};
#elif KIND == KIND_F32
struct Piece {
    float4 quads[4];
    __device__ void load(const LinearArgs& a, int row, int k) {
        const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(a.w) + (size_t)row * a.k + k);
#pragma unroll
        for (int i = 0; i < 4; ++i) quads[i] = __ldg(from + i);
    }
    __device__ void floats(float (&f)[16]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) f[4 * i] = quads[i].x, f[4 * i + 1] = quads[i].y, f[4 * i + 2] = quads[i].z, f[4 * i + 3] = quads[i].w;
    }
};
#endif

// Sum of one lane's group for NPT outputs and RB rows.
template <int RB, int NPT>
__device__ __forceinline__ void group_sums(const LinearArgs& a, const Shared<RB>& s, int n0, int g, float (&acc)[NPT][RB]) {
    const int k0 = g * s.span, k1 = min(a.k, k0 + s.span);
#if KIND >= KIND_BLOCK
    const int blocks = a.k / 32;
    constexpr int AHEAD = RB >= 4 ? 2 : 4;
    for (int k = k0; k < k1; k += 32 * AHEAD) {
        uint4 w[AHEAD][NPT][2];
        u16 dw[AHEAD][NPT], mw[AHEAD][NPT];
#pragma unroll
        for (int b = 0; b < AHEAD; ++b) {
#pragma unroll
            for (int p = 0; p < NPT; ++p) {
                if (k + 32 * b < k1) {
                    const size_t row = min(n0 + p, a.n - 1);
                    const uint4* from = reinterpret_cast<const uint4*>(static_cast<const i8*>(a.w) + row * a.k + k + 32 * b);
                    w[b][p][0] = __ldg(from);
                    w[b][p][1] = __ldg(from + 1);
                    dw[b][p] = __ldg(static_cast<const u16*>(a.scale) + row * blocks + k / 32 + b);
                    if (KIND == KIND_BLOCK_MIN) mw[b][p] = __ldg(static_cast<const u16*>(a.minimum) + row * blocks + k / 32 + b);
                }
            }
        }
#pragma unroll
        for (int b = 0; b < AHEAD; ++b) {
            if (k + 32 * b < k1) {
                float d[NPT], m[NPT];
#pragma unroll
                for (int p = 0; p < NPT; ++p) {
                    d[p] = half_to_float(dw[b][p]);
                    m[p] = KIND == KIND_BLOCK_MIN ? half_to_float(mw[b][p]) : 0.0f;
                }
#pragma unroll
                for (int r = 0; r < RB; ++r) {
                    const uint4* xs = reinterpret_cast<const uint4*>(s.q + r * s.stride + k + 32 * b + 16 * g);
                    const uint4 x0 = xs[0], x1 = xs[1];
                    const float da = s.da[r * blocks + k / 32 + b];
#pragma unroll
                    for (int p = 0; p < NPT; ++p) {
                        int sum = INT_BIAS;
                        sum = __dp4a((int)w[b][p][0].x, (int)x0.x, sum);
                        sum = __dp4a((int)w[b][p][0].y, (int)x0.y, sum);
                        sum = __dp4a((int)w[b][p][0].z, (int)x0.z, sum);
                        sum = __dp4a((int)w[b][p][0].w, (int)x0.w, sum);
                        sum = __dp4a((int)w[b][p][1].x, (int)x1.x, sum);
                        sum = __dp4a((int)w[b][p][1].y, (int)x1.y, sum);
                        sum = __dp4a((int)w[b][p][1].z, (int)x1.z, sum);
                        sum = __dp4a((int)w[b][p][1].w, (int)x1.w, sum);
                        acc[p][r] = fma_(biased_to_float(sum), d[p] * da, acc[p][r]);
                        if (KIND == KIND_BLOCK_MIN) acc[p][r] = fma_(m[p], s.sa[r * blocks + k / 32 + b], acc[p][r]);
                    }
                }
            }
        }
    }
#else
    // AHEAD pieces of 16 components are loaded before the first is used.
    constexpr int AHEAD = RB >= 8 ? 1 : 4;
    for (int k = k0; k < k1; k += 64) {
        float chain[NPT][RB];
#pragma unroll
        for (int p = 0; p < NPT; ++p)
#pragma unroll
            for (int r = 0; r < RB; ++r) chain[p][r] = 0.0f;
#pragma unroll 1
        for (int piece = k; piece < min(k + 64, k1); piece += 16 * AHEAD) {
            Piece w[AHEAD][NPT];
#pragma unroll
            for (int c = 0; c < AHEAD; ++c)
#pragma unroll
                for (int p = 0; p < NPT; ++p)
                    if (piece + 16 * c < k1) w[c][p].load(a, min(n0 + p, a.n - 1), piece + 16 * c);
#pragma unroll
            for (int c = 0; c < AHEAD; ++c) {
                if (piece + 16 * c >= k1) continue;
                float f[NPT][16];
#pragma unroll
                for (int p = 0; p < NPT; ++p) w[c][p].floats(f[p]);
#pragma unroll
                for (int r = 0; r < RB; ++r) {
                    const float4* xs = reinterpret_cast<const float4*>(s.x + r * s.stride + piece + 16 * c + 4 * g);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float4 v = xs[i];
#pragma unroll
                        for (int p = 0; p < NPT; ++p) {
                            float t = chain[p][r];
                            t = fma_(f[p][4 * i], v.x, t);
                            t = fma_(f[p][4 * i + 1], v.y, t);
                            t = fma_(f[p][4 * i + 2], v.z, t);
                            chain[p][r] = fma_(f[p][4 * i + 3], v.w, t);
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int p = 0; p < NPT; ++p)
#pragma unroll
            for (int r = 0; r < RB; ++r) acc[p][r] = acc[p][r] + chain[p][r];
    }
#endif
}

template <int RB, int NPT>
__device__ __forceinline__ void linear_small(const LinearArgs& a) {
    Shared<RB> s(a.k);
    const int warps = blockDim.x >> 5, lane = threadIdx.x & 31, g = lane & 7;
    const int tiles = (a.n + 4 * NPT - 1) / (4 * NPT);
    grid_wait();
    load_rows<RB>(a, s);
    grid_launch_next();
    for (int tile = blockIdx.x * warps + (threadIdx.x >> 5); tile < tiles; tile += gridDim.x * warps) {
        const int n0 = (tile * 4 + (lane >> 3)) * NPT;
        float acc[NPT][RB];
#pragma unroll
        for (int p = 0; p < NPT; ++p)
#pragma unroll
            for (int r = 0; r < RB; ++r) acc[p][r] = 0.0f;
        group_sums<RB, NPT>(a, s, n0, g, acc);
#pragma unroll
        for (int r = 0; r < RB; ++r) {
            float y[NPT];
#pragma unroll
            for (int p = 0; p < NPT; ++p) {
                float v = acc[p][r];
                v = v + __shfl_xor_sync(FULL_MASK, v, 1);
                v = v + __shfl_xor_sync(FULL_MASK, v, 2);
                v = v + __shfl_xor_sync(FULL_MASK, v, 4);
                if (KIND == KIND_INT8) v = v * __ldg(static_cast<const float*>(a.scale) + min(n0 + p, a.n - 1));
                y[p] = v;
            }
            if ((r & 7) != g || r >= a.rows || n0 >= a.n) continue;
            float* out = a.out + (size_t)r * a.out_stride;
            if (a.epilogue == EPILOGUE_SWIGLU) {
                out[n0 / 2] = swiglu(y[0], y[NPT - 1]);
            } else {
#pragma unroll
                for (int p = 0; p < NPT; ++p)
                    if (n0 + p < a.n) out[n0 + p] = a.epilogue == EPILOGUE_ADD ? out[n0 + p] + y[p] : y[p];
            }
        }
    }
}

#define SMALL(RB, NPT) \
    extern "C" __global__ void __launch_bounds__(256, 1) linear_small_##RB##_##NPT(LinearArgs a) { linear_small<RB, NPT>(a); }
SMALL(1, 1) SMALL(2, 1) SMALL(4, 1) SMALL(8, 1) SMALL(16, 1)
SMALL(1, 2) SMALL(2, 2) SMALL(4, 2) SMALL(8, 2) SMALL(16, 2)
