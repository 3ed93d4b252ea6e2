// Selection of one token per wanted position by the canonical integer rule: no sort, exact sums, any top-k up to the vocabulary.
//
// Rows of slots with penalties or a bias are adjusted first (arith::adjusted_logit), into the slot's own copy; the raw logits stay as they
// are, because log-probabilities are read from them. Other rows pass one branch.
//
// One block of 1024 threads a row of logits [vocab]. Order: (logit descending, id ascending). A kept set is always a prefix of that order,
// described by a key and the last id kept among equals; each filter shortens it. The prefix whose count (top-k) or weight (top-p)
// reaches a target is found by one histogram over equal slices of the value range, then three over the key's bits inside one slice.
// Draw: r = high 64 bits of U*W; the first kept id, in id order, whose prefix sum exceeds r. Oracle: arith::select.
//
// bind_adjust   one block per slot that is bound with penalties or a bias: stores them and zeroes the slot's counts.
#include "linear.cuh"

struct SelectRow {
    u64 seed;
    u64 top_p;        // round(p * 2^32); 2^32 keeps all
    u32 token_index, choice;
    u32 top_k;        // 0 keeps all
    float inv_temperature, min_p;
    u32 greedy;
    u32 slot;
    u32 is_last;      // the slot's last token becomes this one
    u32 adjusted;     // the slot has penalties or a bias, and the row selects one token
    u32 lane;         // which of the two lanes takes the result
};

struct Adjustment {
    float presence, frequency;
    u32 biases, reserved;
};

struct Bias {
    u32 id;
    float value;
};
#define MAX_BIAS 1024

struct AdjustArgs {
    Adjustment* slots;  // [slots]
    Bias* biases;       // [slots][MAX_BIAS], ids ascending
    u32* counts;        // [slots][vocab]: how often the slot has selected each token
    float* adjusted;    // [slots][vocab]
};

struct SelectOut {
    u32 token, finite;
};

// Where results go: page-locked memory of the host, a buffer [rows] for each step in flight.
struct Lanes {
    SelectOut* lanes[2];
};

#define THREADS 1024
#define BINS 2048

struct Scratch {
    u64 bins[BINS];
    u64 warp_sums[32];
    u64 found, above;
    u32 bin;
};

struct Kept {
    u32 key, last_id;  // kept: key above, or equal and id at most last_id
};

struct Row {
    const float* logits;
    int vocab;
    float highest, lowest, inv_temperature;
    __device__ float at(int i) const { return logits[i] + 0.0f; }
    __device__ float e(float l) const { return exp_c((l - highest) * inv_temperature); }
    __device__ u64 weight(float l) const { return __float2ull_rz(e(l) * 1099511627776.0f); }
    __device__ u32 slice(float l) const {
        const float width = highest - lowest;
        if (!(width > 0.0f && width < 3e38f)) return 0;
        const float t = __fdiv_rn(highest - l, width) * (float)(BINS - 1);
        return min((u32)(BINS - 1), (u32)t);
    }
};

__device__ __forceinline__ bool keeps(Kept k, u32 key, int id) { return key > k.key || (key == k.key && (u32)id <= k.last_id); }

__device__ u64 block_sum(u64 v, Scratch& s) {
#pragma unroll
    for (int h = 16; h >= 1; h >>= 1) v += __shfl_xor_sync(FULL_MASK, v, h);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) s.warp_sums[threadIdx.x >> 5] = v;
    __syncthreads();
    u64 total = 0;
    for (int i = 0; i < 32; ++i) total += s.warp_sums[i];
    return total;
}

// Sum of v over lower threads.
__device__ u64 block_exclusive(u64 v, Scratch& s) {
    const int lane = threadIdx.x & 31;
    u64 inclusive = v;
#pragma unroll
    for (int h = 1; h < 32; h <<= 1) {
        const u64 other = __shfl_up_sync(FULL_MASK, inclusive, h);
        if (lane >= h) inclusive += other;
    }
    __syncthreads();
    if (lane == 31) s.warp_sums[threadIdx.x >> 5] = inclusive;
    __syncthreads();
    u64 before = 0;
    for (int i = 0; i < (int)(threadIdx.x >> 5); ++i) before += s.warp_sums[i];
    return before + inclusive - v;
}

// First bin, from `bins` - 1 downwards when DOWN else from 0 upwards, whose running sum reaches target - above; adds the sum before it.
template <bool DOWN>
__device__ u32 reach(Scratch& s, u64 target, u64& above) {
    __syncthreads();
    const int i0 = DOWN ? BINS - 1 - 2 * (int)threadIdx.x : 2 * (int)threadIdx.x, i1 = DOWN ? i0 - 1 : i0 + 1;
    const u64 a = s.bins[i0], b = s.bins[i1];
    const u64 before = above + block_exclusive(a + b, s);
    if (before < target && target <= before + a) s.bin = i0, s.above = before;
    else if (before + a < target && target <= before + a + b) s.bin = i1, s.above = before + a;
    __syncthreads();
    above = s.above;
    const u32 bin = s.bin;
    __syncthreads();
    return bin;
}

__device__ void clear_bins(Scratch& s) {
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS) s.bins[i] = 0;
    __syncthreads();
}

// First id, in id order, whose running sum of f exceeds `point`; the total of f exceeds it too.
template <typename F>
__device__ int find(const Row& row, Scratch& s, u64 point, F f) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, chunk = (row.vocab + 31) / 32;
    u64 sum = 0;
    for (int i = warp * chunk + lane; i < min(row.vocab, (warp + 1) * chunk); i += 32) sum += f(i);
#pragma unroll
    for (int h = 16; h >= 1; h >>= 1) sum += __shfl_xor_sync(FULL_MASK, sum, h);
    __syncthreads();
    if (lane == 0) s.warp_sums[warp] = sum;
    __syncthreads();
    u64 base = 0;
    int c = 0;
    while (c < 31 && base + s.warp_sums[c] <= point) base += s.warp_sums[c++];
    const int start = c * chunk, end = min(row.vocab, start + chunk), each = (chunk + THREADS - 1) / THREADS;
    const int from = start + (int)threadIdx.x * each, to = min(end, from + each);
    u64 mine = 0;
    for (int i = from; i < to; ++i) mine += f(i);
    u64 before = base + block_exclusive(mine, s);
    if (before <= point && point < before + mine) {
        int i = from;
        for (u64 v = f(i); before + v <= point; v = f(++i)) before += v;
        s.found = i;
    }
    __syncthreads();
    const int found = (int)s.found;
    __syncthreads();
    return found;
}

// Shortens `kept` to the shortest prefix whose measure reaches `target`; the measure of `kept` is at least that, and target at least 1.
template <bool WEIGHTED>
__device__ Kept shorten(const Row& row, Scratch& s, Kept kept, u64 target) {
    u64 above = 0;
    clear_bins(s);
    for (int i = threadIdx.x; i < row.vocab; i += THREADS) {
        const float l = row.at(i);
        if (!keeps(kept, sortable(l), i)) continue;
        const u64 v = WEIGHTED ? row.weight(l) : 1;
        if (v) atomicAdd(&s.bins[row.slice(l)], v);
    }
    const u32 slice = reach<false>(s, target, above);
    u32 prefix = 0;
#pragma unroll 1
    for (int digit = 0; digit < 3; ++digit) {
        const int shift = digit == 0 ? 21 : digit == 1 ? 10 : 0, bits = digit == 2 ? 10 : 11;
        clear_bins(s);
        for (int i = threadIdx.x; i < row.vocab; i += THREADS) {
            const float l = row.at(i);
            const u32 key = sortable(l);
            if (!keeps(kept, key, i) || row.slice(l) != slice) continue;
            if (digit > 0 && (key >> (shift + bits)) != prefix) continue;
            const u64 v = WEIGHTED ? row.weight(l) : 1;
            if (v) atomicAdd(&s.bins[(key >> shift) & ((1u << bits) - 1)], v);
        }
        prefix = (prefix << bits) | reach<true>(s, target, above);
    }
    const u32 key = prefix;
    const u64 each = WEIGHTED ? row.weight(unsortable(key)) : 1;
    const u64 need = (target - above + each - 1) / each;
    Kept shorter = {key, 0};
    shorter.last_id = find(row, s, need - 1, [&](int i) -> u64 {
        const u32 k = sortable(row.at(i));
        return k == key && keeps(kept, k, i) ? 1 : 0;
    });
    return shorter;
}

// arith::top_p_target: ceil(p * w / 2^32) in 96 bits.
__device__ __forceinline__ u64 top_p_target(u64 p, u64 w) {
    const u64 low = p * w, high = __umul64hi(p, w);
    return ((high << 32) | (low >> 32)) + ((low & 0xffffffffull) ? 1 : 0);
}

// Philox4x32-10, words 0 and 1 of counter (token index, choice, 0, 0).
__device__ u64 token_draw(u64 seed, u32 token_index, u32 choice) {
    u32 c0 = token_index, c1 = choice, c2 = 0, c3 = 0, k0 = (u32)seed, k1 = (u32)(seed >> 32);
    for (int i = 0; i < 10; ++i) {
        const u32 h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0, h1 = __umulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
        c0 = h1 ^ c1 ^ k0, c1 = l1, c2 = h0 ^ c3 ^ k1, c3 = l0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return ((u64)c0 << 32) | c1;
}

// words: (slot, offset in words) per binding; at the offset presence, frequency, biases, then (id, value) each.
extern "C" __global__ void __launch_bounds__(THREADS) bind_adjust(const u32* words, AdjustArgs a, int vocab) {
    const u32 slot = words[2 * blockIdx.x];
    const u32* from = words + words[2 * blockIdx.x + 1];
    const u32 biases = from[2];
    if (threadIdx.x == 0) a.slots[slot] = {__uint_as_float(from[0]), __uint_as_float(from[1]), biases, 0};
    for (u32 i = threadIdx.x; i < biases; i += THREADS) {
        a.biases[(size_t)slot * MAX_BIAS + i] = {from[3 + 2 * i], __uint_as_float(from[4 + 2 * i])};
    }
    for (int i = threadIdx.x; i < vocab; i += THREADS) a.counts[(size_t)slot * vocab + i] = 0;
}

// arith::adjusted_logits into the slot's copy.
__device__ __forceinline__ const float* adjust(const float* logits, const AdjustArgs& a, u32 slot, int vocab) {
    const Adjustment own = a.slots[slot];
    const u32* counts = a.counts + (size_t)slot * vocab;
    float* to = a.adjusted + (size_t)slot * vocab;
    for (int i = threadIdx.x; i < vocab; i += THREADS) {
        const u32 count = counts[i];
        float l = logits[i];
        if (count) l = fma_(-__uint2float_rn(count), own.frequency, l) - own.presence;
        to[i] = l;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < own.biases; i += THREADS) {
        const Bias bias = a.biases[(size_t)slot * MAX_BIAS + i];
        to[bias.id] = to[bias.id] + bias.value;
    }
    __syncthreads();
    return to;
}

extern "C" __global__ void __launch_bounds__(THREADS) select_token(const float* logits, const SelectRow* rows,
                                                                   Lanes out, u32* last_token,
                                                                   AdjustArgs adjusting, int vocab) {
    __shared__ Scratch s;
    __shared__ u32 lowest_keys[32];
    grid_launch_next();
    grid_wait();
    const SelectRow r = rows[blockIdx.x];
    Row row = {logits + (size_t)blockIdx.x * vocab, vocab, 0.0f, 0.0f, r.inv_temperature};
    if (r.adjusted) row.logits = adjust(row.logits, adjusting, r.slot, vocab);
    u64 best = 0;
    u32 lowest = 0xffffffffu;
    int finite = 1;
    constexpr int AHEAD = 8;
    for (int base = threadIdx.x; base < vocab; base += AHEAD * THREADS) {
        float l[AHEAD];
#pragma unroll
        for (int c = 0; c < AHEAD; ++c) l[c] = base + c * THREADS < vocab ? row.logits[base + c * THREADS] : 0.0f;
#pragma unroll
        for (int c = 0; c < AHEAD; ++c) {
            const int i = base + c * THREADS;
            if (i >= vocab) break;
            const u32 key = sortable(l[c] + 0.0f);
            finite &= (__float_as_uint(l[c]) & 0x7f800000u) != 0x7f800000u;
            best = max(best, ((u64)key << 32) | (u32)~i);
            lowest = min(lowest, key);
        }
    }
#pragma unroll
    for (int h = 16; h >= 1; h >>= 1) {
        best = max(best, __shfl_xor_sync(FULL_MASK, best, h));
        lowest = min(lowest, __shfl_xor_sync(FULL_MASK, lowest, h));
    }
    if ((threadIdx.x & 31) == 0) s.warp_sums[threadIdx.x >> 5] = best, lowest_keys[threadIdx.x >> 5] = lowest;
    finite = __syncthreads_and(finite);
    for (int i = 0; i < 32; ++i) best = max(best, s.warp_sums[i]), lowest = min(lowest, lowest_keys[i]);
    u32 token = ~(u32)best;
    if (finite && !r.greedy) {
        row.highest = unsortable((u32)(best >> 32));
        row.lowest = unsortable(lowest);
        Kept kept = {0, 0xffffffffu};
        if (r.top_k && r.top_k < (u32)vocab) kept = shorten<false>(row, s, kept, r.top_k);
        if (r.top_p < (1ull << 32)) {
            u64 mine = 0;
            for (int i = threadIdx.x; i < vocab; i += THREADS) {
                const float l = row.at(i);
                if (keeps(kept, sortable(l), i)) mine += row.weight(l);
            }
            kept = shorten<true>(row, s, kept, top_p_target(r.top_p, block_sum(mine, s)));
        }
        auto weight = [&](int i) -> u64 {
            const float l = row.at(i);
            return keeps(kept, sortable(l), i) && row.e(l) >= r.min_p ? row.weight(l) : 0;
        };
        u64 mine = 0;
        for (int i = threadIdx.x; i < vocab; i += THREADS) mine += weight(i);
        const u64 total = block_sum(mine, s);
        const u64 point = __umul64hi(token_draw(r.seed, r.token_index, r.choice), total);
        if (point < total) token = find(row, s, point, weight);
    }
    if (threadIdx.x == 0) {
        if (!finite) token = 0;
        out.lanes[r.lane & 1][blockIdx.x] = {token, (u32)finite};
        if (r.is_last) last_token[r.slot] = token;
        if (r.adjusted) adjusting.counts[(size_t)r.slot * vocab + token] += 1;
    }
}
