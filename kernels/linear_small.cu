// out[r][n] = epilogue(sum over k of x[r][k] * w[n][k]) for at most 16 rows: the shape of decode, bound by the weights' bandwidth.
//
// Prologue, repeated by every block in shared memory: gather, RMSNorm and, for block weights, quantisation of the activations (for
// few rows a launch costs more), or a copy of rows that were quantised before. Eight lanes own the eight groups of one output; the warp's other 24 lanes own three (or, with two
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

// Row r of the input, gathered; null past the last row.
__device__ __forceinline__ const float* input_row(const LinearArgs& a, int r) {
    return r < a.rows ? a.x + (size_t)(a.gather ? a.gather[r] : r) * a.x_stride : nullptr;
}

// 1/sqrt(mean + eps) of every row into `scale`: a warp owns parts 32g..32g+31 of a row, the order of arith::rms_norm.
template <int RB>
__device__ __forceinline__ void load_scales(const LinearArgs& a, float (&scale)[RB]) {
    __shared__ float sums[RB][8];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
#pragma unroll 1
    for (int item = warp; item < 8 * a.rows; item += warps) {
        const int r = item >> 3, g = item & 7;
        const float* from = input_row(a, r);
        float part = 0.0f;
        for (int base = 32 * g + lane; base < a.k; base += 1024) {
            float v[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) v[c] = base + 256 * c < a.k ? from[base + 256 * c] : 0.0f;
#pragma unroll
            for (int c = 0; c < 4; ++c)
                if (base + 256 * c < a.k) part = fma_(v[c], v[c], part);
        }
        part = tree32(part);
        if (lane == 0) sums[r][g] = part;
    }
    __syncthreads();
    if (threadIdx.x < a.rows) {
        const float mean = __fdiv_rn(combine_parts(sums[threadIdx.x]), (float)a.k);
        scale[threadIdx.x] = __fdiv_rn(1.0f, __fsqrt_rn(mean + a.eps));
    }
    __syncthreads();
}

// Copies rows that were quantised before.
template <int RB>
__device__ __forceinline__ void load_quantised(const LinearArgs& a, Shared<RB>& s) {
    const int pieces = a.k / 16, blocks = a.k / 32;
#pragma unroll 4
    for (int i = threadIdx.x; i < RB * pieces; i += blockDim.x) {
        const int r = i / pieces, k = i % pieces * 16;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (r < a.rows) v = *reinterpret_cast<const uint4*>(a.xq + (size_t)r * a.k + k);
        *reinterpret_cast<uint4*>(s.q + r * s.stride + k + 16 * (k / s.span)) = v;
    }
#pragma unroll 4
    for (int i = threadIdx.x; i < RB * blocks; i += blockDim.x) {
        s.da[i] = i < a.rows * blocks ? a.da[i] : 0.0f;
        if (KIND == KIND_BLOCK_MIN) s.sa[i] = i < a.rows * blocks ? a.sa[i] : 0.0f;
    }
    __syncthreads();
}

// Loads, normalises and quantises the rows into shared memory; four pieces of 128 components a warp are in flight together.
template <int RB>
__device__ __forceinline__ void load_rows(const LinearArgs& a, Shared<RB>& s) {
    if (BLOCKS && a.xq) {
        load_quantised<RB>(a, s);
        return;
    }
    constexpr int AHEAD = 4;
    __shared__ float scale[RB];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    if (a.norm) load_scales<RB>(a, scale);
    const int pieces = (a.k + 127) / 128;
#pragma unroll 1
    for (int first = warp; first < RB * pieces; first += AHEAD * warps) {
        float4 v[AHEAD], g[AHEAD];
#pragma unroll
        for (int c = 0; c < AHEAD; ++c) {
            const int item = first + c * warps, r = item / pieces, i = item % pieces * 128 + 4 * lane;
            const bool live = r < a.rows && i < a.k;
            v[c] = live ? *reinterpret_cast<const float4*>(input_row(a, r) + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            g[c] = live && a.norm ? *reinterpret_cast<const float4*>(a.norm + i) : v[c];
        }
#pragma unroll
        for (int c = 0; c < AHEAD; ++c) {
            const int item = first + c * warps, r = item / pieces, i = item % pieces * 128 + 4 * lane;
            if (item >= RB * pieces) break;
            if (a.norm) {
                const float f = r < a.rows ? scale[r] : 0.0f;
                v[c] = make_float4((v[c].x * f) * g[c].x, (v[c].y * f) * g[c].y, (v[c].z * f) * g[c].z, (v[c].w * f) * g[c].w);
            }
            if (BLOCKS) {
                float d;
                int sum;
                const u32 word = quantise_quad(v[c], d, sum);
                if (i < a.k) {
                    *reinterpret_cast<u32*>(s.q + r * s.stride + i + 16 * (i / s.span)) = word;
                    if ((lane & 7) == 0) {
                        s.da[r * (a.k / 32) + i / 32] = d;
                        if (KIND == KIND_BLOCK_MIN) s.sa[r * (a.k / 32) + i / 32] = d * (float)sum;
                    }
                }
            } else if (i < a.k) {
                *reinterpret_cast<float4*>(s.x + r * s.stride + i + 4 * (i / s.span)) = v[c];
            }
        }
    }
    __syncthreads();
}

// Asks for the lines of a lane's first weights; they are constants, so the predecessor need not have ended.
template <int NPT>
__device__ __forceinline__ void prefetch_weights(const LinearArgs& a, int n0, int k0, int span) {
    const int size = KIND == KIND_F32 ? 4 : 1;
    if (k0 >= a.k || n0 >= a.n) return;
#pragma unroll
    for (int p = 0; p < NPT; ++p) {
        const char* row = static_cast<const char*>(a.w) + (size_t)min(n0 + p, a.n - 1) * a.k * size;
        for (int k = k0; k < min(a.k, k0 + span); k += 128 / size) asm volatile("prefetch.global.L2 [%0];" ::"l"(row + (size_t)k * size));
    }
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
    if (RB <= 4) grid_launch_next();
    const int first = (blockIdx.x * warps + (threadIdx.x >> 5)) * 4 + (lane >> 3);
    prefetch_weights<NPT>(a, first * NPT, g * s.span, s.span);
    grid_wait();
    load_rows<RB>(a, s);
    if (RB > 4) grid_launch_next();
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
            // With one output a lane, gate and up lie in neighbouring groups of eight lanes.
            const float up = NPT == 1 ? __shfl_xor_sync(FULL_MASK, y[0], 8) : y[NPT - 1];
            if ((r & 7) != g || r >= a.rows || n0 >= a.n) continue;
            float* out = a.out + (size_t)r * a.out_stride;
            if (a.epilogue == EPILOGUE_SWIGLU) {
                if ((n0 & 1) == 0) out[n0 / 2] = swiglu(y[0], up);
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
