// wave.h: what the lanes of a warp and of a block do together: barriers, shuffles, ballots, and atomics on memory.
#pragma once
#include "block.h"

namespace standin {

// The exchange under way, with this lane noted as present; its slot is to be filled before the lane waits.
inline Exchange &join_exchange(Warp &warp) {
    Exchange &exchange = warp.exchange[warp.generation & 1];
    if (warp.arrived == 0) exchange.present = 0;
    exchange.present |= 1ull << self->index;
    return exchange;
}

// All running lanes of the warp meet; each then reads what lane `source` brought. A lane that does not exist or has ended
// gives 0xff bytes (NaN): on the card the value is undefined.
template <class T>
inline T exchange(T value, unsigned source, int site) {
    static_assert(sizeof(T) <= sizeof Exchange::slot[0]);
    Warp &warp = *self->warp;
    Exchange &exchange = join_exchange(warp);
    memcpy(exchange.slot[self->index], &value, sizeof value);
    wait(warp, site, "shuffle");
    if (source < wave_size && (exchange.present >> source & 1))
        memcpy(&value, exchange.slot[source], sizeof value);
    else
        memset(&value, 0xff, sizeof value);
    return value;
}

inline uint64_t ballot(bool predicate, int site) {
    Warp &warp = *self->warp;
    Exchange &exchange = join_exchange(warp);
    exchange.slot[self->index][0] = predicate;
    wait(warp, site, "ballot");
    uint64_t mask = 0;
    for (unsigned i = 0; i < wave_size; ++i)
        if ((exchange.present >> i & 1) && exchange.slot[i][0]) mask |= 1ull << i;
    return mask;
}

// Lane that DPP control word `control` reads from, within rows of 16; -1 where the row ends.
inline int dpp_source(int lane, int control) {
    const int row = lane & ~15, column = lane & 15, n = control & 15;
    int to = -1;
    if (control < 0x100) return (lane & ~3) + (control >> 2 * (lane & 3) & 3);  // quad_perm
    if (control >= 0x101 && control <= 0x10f)
        to = column + n;  // row_shl
    else if (control >= 0x111 && control <= 0x11f)
        to = column - n;  // row_shr
    else if (control >= 0x121 && control <= 0x12f)
        to = (column - n) & 15;  // row_ror
    else if (control == 0x140)
        to = 15 - column;  // row_mirror
    else if (control == 0x141)
        to = (column & 8) | (7 - (column & 7));  // row_half_mirror
    else if (control >= 0x150 && control <= 0x15f)
        to = n;  // row_share / row_newbcast
    else if (control >= 0x160 && control <= 0x16f)
        to = column ^ n;  // row_xmask
    else
        fail(hipErrorLaunchFailure, "DPP control %#x has no model here", control);
    return to < 0 || to > 15 ? -1 : row + to;
}

inline int update_dpp(int old, int value, int control, int row_mask, int bank_mask, bool bound_control, int site) {
    const int lane = int(self->index), source = dpp_source(lane, control);
    const int got = exchange(value, unsigned(source < 0 ? lane : source), site);
    if (!(row_mask >> (lane >> 4 & 3) & 1) || !(bank_mask >> (lane >> 2 & 3) & 1)) return old;
    return source >= 0 ? got : bound_control ? 0 : old;
}

template <class T, class F>
inline T read_modify_write(T *address, F f) {  // lanes run one at a time: plain is atomic
    const T before = *address;
    *address = f(before);
    return before;
}

}  // namespace standin

inline void __syncthreads(int site = __builtin_LINE()) {
    ::standin::wait(::standin::block_barrier, site, "__syncthreads");
}
inline void __syncwarp(uint64_t = ~0ull, int site = __builtin_LINE()) {
    ::standin::wait(*::standin::self->warp, site, "__syncwarp");
}
inline void __builtin_amdgcn_s_barrier(int site = __builtin_LINE()) { __syncthreads(site); }
inline void __builtin_amdgcn_wave_barrier(int site = __builtin_LINE()) { __syncwarp(~0ull, site); }
#define __builtin_amdgcn_fence(order, scope) ((void)0)
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T>
inline T __shfl_xor(T v, int mask, int width = warpSize, int site = __builtin_LINE()) {
    const unsigned lane = ::standin::self->index, source = lane ^ unsigned(mask);
    return ::standin::exchange(v, source / unsigned(width) == lane / unsigned(width) ? source : lane, site);
}
template <class T>
inline T __shfl_down(T v, unsigned delta, int width = warpSize, int site = __builtin_LINE()) {
    const unsigned lane = ::standin::self->index;
    return ::standin::exchange(v, lane % unsigned(width) + delta < unsigned(width) ? lane + delta : lane, site);
}
template <class T>
inline T __shfl_up(T v, unsigned delta, int width = warpSize, int site = __builtin_LINE()) {
    const unsigned lane = ::standin::self->index;
    return ::standin::exchange(v, lane % unsigned(width) >= delta ? lane - delta : lane, site);
}
template <class T>
inline T __shfl(T v, int source, int width = warpSize, int site = __builtin_LINE()) {
    const unsigned lane = ::standin::self->index, w = unsigned(width);
    return ::standin::exchange(v, lane / w * w + unsigned(source) % w, site);
}
inline uint64_t __ballot(int predicate, int site = __builtin_LINE()) { return ::standin::ballot(predicate != 0, site); }
inline int __any(int predicate, int site = __builtin_LINE()) { return __ballot(predicate, site) != 0; }
inline int __all(int predicate, int site = __builtin_LINE()) { return __ballot(!predicate, site) == 0; }
inline uint __lane_id() { return ::standin::self->index; }

// The builtins below exist for AMD's targets only; a kernel that uses them directly still runs here.
inline uint __builtin_amdgcn_mbcnt_lo(uint mask, uint add) {
    const unsigned lane = ::standin::self->index;
    return add + uint(__builtin_popcount(lane >= 32 ? mask : mask & ((1u << lane) - 1)));
}
inline uint __builtin_amdgcn_mbcnt_hi(uint mask, uint add) {
    const unsigned lane = ::standin::self->index;
    return add + (lane > 32 ? uint(__builtin_popcount(mask & ((1u << (lane - 32)) - 1))) : 0u);
}
inline uint __builtin_amdgcn_ballot_w32(bool p, int site = __builtin_LINE()) { return uint(__ballot(p, site)); }
inline uint64_t __builtin_amdgcn_ballot_w64(bool p, int site = __builtin_LINE()) { return __ballot(p, site); }
inline int __builtin_amdgcn_ds_bpermute(int byte_address, int value, int site = __builtin_LINE()) {
    return ::standin::exchange(value, unsigned(byte_address >> 2) % ::standin::wave_size, site);
}
inline int __builtin_amdgcn_readlane(int value, int lane, int site = __builtin_LINE()) {
    return ::standin::exchange(value, unsigned(lane) % ::standin::wave_size, site);
}
inline int __builtin_amdgcn_readfirstlane(int value, int site = __builtin_LINE()) {
    return ::standin::exchange(value, unsigned(__builtin_ctzll(::standin::self->warp->running)), site);
}
inline int __builtin_amdgcn_update_dpp(int old, int value, int control, int row_mask, int bank_mask, bool bound_control,
                                       int site = __builtin_LINE()) {
    return ::standin::update_dpp(old, value, control, row_mask, bank_mask, bound_control, site);
}
inline int __builtin_amdgcn_mov_dpp(int value, int control, int row_mask, int bank_mask, bool bound_control,
                                    int site = __builtin_LINE()) {
    return ::standin::update_dpp(0, value, control, row_mask, bank_mask, bound_control, site);
}
inline uint __builtin_amdgcn_perm(uint high, uint low, uint selectors) {
    const uint64_t bytes = uint64_t(high) << 32 | low;
    uint result = 0;
    for (int i = 0; i < 4; ++i) {
        const uint s = selectors >> 8 * i & 255;
        result |= (s < 8 ? uint(bytes >> 8 * s) & 255 : s == 12 ? 0u : 255u) << 8 * i;
    }
    return result;
}

template <class T, class U>
inline T atomicAdd(T *p, U v) {
    return ::standin::read_modify_write(p, [=](T old) { return T(old + T(v)); });
}
template <class T, class U>
inline T atomicMax(T *p, U v) {
    return ::standin::read_modify_write(p, [=](T old) { return old < T(v) ? T(v) : old; });
}
template <class T, class U>
inline T atomicMin(T *p, U v) {
    return ::standin::read_modify_write(p, [=](T old) { return T(v) < old ? T(v) : old; });
}
template <class T, class U>
inline T atomicOr(T *p, U v) {
    return ::standin::read_modify_write(p, [=](T old) { return T(old | T(v)); });
}
template <class T, class U>
inline T atomicAnd(T *p, U v) {
    return ::standin::read_modify_write(p, [=](T old) { return T(old & T(v)); });
}
template <class T, class U>
inline T atomicExch(T *p, U v) {
    return ::standin::read_modify_write(p, [=](T) { return T(v); });
}
template <class T, class U, class V>
inline T atomicCAS(T *p, U expected, V v) {
    return ::standin::read_modify_write(p, [=](T old) { return old == T(expected) ? T(v) : old; });
}
