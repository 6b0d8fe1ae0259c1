// Weights of 8 and 4 bits as pairs of 16 bits, exactly, in registers. HALF is 0 for bfloat16 and 1 for float16.
//
// The numbers of a word's four bytes become two pairs: those of bytes 0 and 2, and of 1 and 3, for which nothing has to be
// moved but by a shift. What they are multiplied by lies so, too: eight numbers by `interleave`.
#pragma once

__device__ __forceinline__ uint4 interleave(uint4 x) {
  return make_uint4(__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.x, x.y, 0x7632), __byte_perm(x.z, x.w, 0x5410),
                    __byte_perm(x.z, x.w, 0x7632));
}

// int8: byte k of the word is number k.
__device__ __forceinline__ u32 widen_int8(u32 pair) {  // each in the low byte of its half
#if HALF  // 1024 + (x + 128), less 1152
  return add_pairs(put_into(pair ^ 0x00800080, 0x00FF00FF, 0x64006400), 0xE480E480);
#else  // 128 + the low 7 bits, less 128, or 256 where the sign is set: that is the exponent's last bit
  return add_pairs(put_into(pair, 0x007F007F, 0x43004300), put_into(pair, 0x00800080, 0xC300C300));
#endif
}
__device__ __forceinline__ void unpack_int8(u32 word, u32& first, u32& second) {
  first = widen_int8(word), second = widen_int8(word >> 8);
}

// e4m3: the bits in their places, and the exponent's bias by a multiplication.
__device__ __forceinline__ u32 widen_fp8(u32 pair) {  // each in the high byte of its half
#if HALF
  return multiply_pairs(put_into(pair, 0x80008000, pair >> 1 & 0x3F803F80), 0x5C005C00);
#else
  return multiply_pairs(put_into(pair, 0x80008000, pair >> 4 & 0x07F007F0), 0x7B807B80);
#endif
}
__device__ __forceinline__ void unpack_fp8(u32 word, u32& first, u32& second) {
  first = widen_fp8(word << 8), second = widen_fp8(word);
}

// int4: nibbles of the word's four bytes, less a zero point. A nibble in the low bits of 128, or of 1024, is both together.
__device__ __forceinline__ u32 negative_zero(u32 zero) {  // what takes off the zero point, and the 128 or 1024
  const u32 one = (HALF ? 0xE400 : 0xC300) + zero;
  return one | one << 16;
}
__device__ __forceinline__ void unpack_int4(u32 word, int nibble, u32 zero, u32& first, u32& second) {
  const u32 base = HALF ? 0x64006400 : 0x43004300;
  first = add_pairs(put_into(word >> 4 * nibble, 0x000F000F, base), zero);
  second = add_pairs(put_into(word >> (4 * nibble + 8), 0x000F000F, base), zero);
}
