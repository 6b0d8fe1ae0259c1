// Which sequence a tile of attention is of: a batch, or one of packed sequences, which lie one behind the other.
#pragma once

// A tile of packed sequences, as `packed_kernels.py` writes it. The first entry of a table has their `count`.
struct Entry {
  union { int count, block; };  // rows of the tile: those of the block of that number of the sequence
  int query, queries, key, keys;  // first token, and how many
  int number;                     // of the sequence
  int unused[2];
};

struct Sequence {
  int batch, query, key;           // its first query and key in that batch
  int queries, keys;               // tokens
  int query_row, query_batch, key_row, key_batch;  // what row 0 is to TMA
};
__device__ __forceinline__ Sequence sequence_of(int batch, int queries, int keys) {
  return {batch, 0, 0, queries, keys, 0, batch, 0, batch};
}
// To TMA a packed tensor has its tokens as rows and once more as batches, and begins as many tokens before the first one:
// row r of batch b is token r + b less all of them. So a sequence can end at the last row, as a batch does: what a box
// has beyond it is read as 0, and not written.
__device__ __forceinline__ Sequence sequence_of(const Entry& entry, int all_queries, int all_keys) {
  return {0, entry.query, entry.key, entry.queries, entry.keys, all_queries - entry.queries, entry.query + entry.queries,
          all_keys - entry.keys, entry.key + entry.keys};
}
