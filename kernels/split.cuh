// split -- an fp32 weight as two halves of 16 bits: what products read, and the rest.
// The high half is the value rounded to bf16, half away from zero; with the low 16 bits of the value it gives the value
// back: where the topmost of these is set, rounding has added one. A NaN stays a NaN.

__device__ __forceinline__ void split_weight(float x, u16& high, u16& low) {
    const u32 bits = __float_as_uint(x);
    const bool nan = x != x;
    high = nan ? 0x7fff : (u16)(bits + 0x8000 >> 16);
    low = nan ? 0 : (u16)bits;
}
__device__ __forceinline__ float join_weight(u16 high, u16 low) {
    return __uint_as_float(((u32)high << 16) - ((u32)(low & 0x8000) << 1) | low);
}
// The same for COUNT neighbours; the places are aligned to as many halves.
template <int COUNT>
__device__ __forceinline__ void split_n(bf16* high, u16* low, const float (&x)[COUNT]) {
    Packed<bf16, COUNT> highs;
    Packed<u16, COUNT> lows;
#pragma unroll
    for (int j = 0; j < COUNT; j++) split_weight(x[j], highs.v[j].bits, lows.v[j]);
    put_packed(high, highs);
    put_packed(low, lows);
}
template <int COUNT>
__device__ __forceinline__ void join_n(const bf16* high, const u16* low, float (&x)[COUNT]) {
    const Packed<bf16, COUNT> highs = packed<COUNT>(high);
    const Packed<u16, COUNT> lows = packed<COUNT>(low);
#pragma unroll
    for (int j = 0; j < COUNT; j++) x[j] = join_weight(highs.v[j].bits, lows.v[j]);
}
