// FlashAttention-3 forward on TMA and wgmma, 16 bits; sm_90 alone.
// Source: Shah et al., arXiv:2407.08608, Algorithms 1 and 2; Dao, arXiv:2307.08691, Algorithm 1.
//
//   in    q [B, H, Tq, D]   k [B, Hkv, Tk, D]   v [B, Hkv, Tk, Dv]   tensor maps; Tk > 0
//         mask, as MaskTiles in the workspace; bias, ALiBi slopes, sink
//   out   o [B, H, Tq, Dv]  lse [B, H, Tq]      float32, natural log
//   grid  at most as many blocks as the card has room for: they stay, and take tile after tile
//   block warpgroups that compute, of 64 rows each; then one that loads
//   smem  kQBuffers tiles of Q, kStages each of K and V, with ones behind V if kOnes; mbarriers and
//         jobs in kControlBytes
//
// docs/hopper.md tells the whole.
#include "attn/blind_softmax.cuh"
#include "attn/drop_weights.cuh"
#include "attn/epilogue_mma.cuh"
#include "attn/key_range.cuh"
#include "attn/score_inputs.cuh"
#include "attn/tile_path.cuh"
#include "ptx/barrier.cuh"
#include "ptx/elect.cuh"
#include "ptx/fence.cuh"
#include "ptx/setmaxnreg.cuh"
#include "tile/warpgroup_matmul.cuh"

// Columns. Products know one swizzle, that of slabs of 128 bytes, so tiles have whole ones.
constexpr int kSlab = 8 * kChunk;
using TileQ = SwizzledTile<kBlockM, ceil_div(kHeadDim, kSlab) * kSlab>;
using TileK = SwizzledTile<kBlockN, ceil_div(kHeadDim, kSlab) * kSlab>;
constexpr int kSlabsV = ceil_div(kHeadDimV, kSlab);
using Scores = MmaFragment<1, kBlockN / 8>;
using Weights = OperandFragment<1, kBlockN / 16>;
using Output = MmaFragment<1, kHeadDimV / 8>;

constexpr int kConsumers = kThreads / 128 - 1;
constexpr int kControlBytes = 768;  // as in gpu/config.py; not all are used

// Behind V's slabs may be one of ones (plan.py: KernelKey.ones): eight columns of O are then the
// sums of its rows' weights, as these are in the product. They take no instruction, and 3 to 6 % of
// the time of both products; to add weights up takes more.
using TileV = SwizzledTile<kBlockN, (kSlabsV + kOnes) * kSlab>;
using OutputAndSums = MmaFragment<1, kHeadDimV / 8 + kOnes>;

constexpr int kKeyBytes = kStages * (TileK::kBytes + TileV::kBytes);
// With two, the first product of a tile runs beside the last of the tile before.
constexpr int kQBuffers = (kSmemBytes - kControlBytes - kKeyBytes) / TileQ::kBytes;

static_assert(kBlockM == 64 * kConsumers, "a warpgroup has 64 rows");
static_assert(kQBuffers == 1 || kQBuffers == 2);
static_assert(kSmemBytes == kQBuffers * TileQ::kBytes + kKeyBytes + kControlBytes,
              "gpu/config.py");
static_assert(kAligned && sizeof(Elem) == 2);

// Registers of a thread, in eights as setmaxnreg counts: what it has at launch, its share of the
// multiprocessor's 65536, and what the warpgroups that compute have once the one that loads has
// given up all but the fewest that setmaxnreg takes. Instructions can name 255.
constexpr int kMostRegs = 248;
constexpr int kGivenRegs = min_of(kMostRegs, 65536 / (kBlocksPerSm * kThreads) / 8 * 8);
constexpr int kProducerRegs = 24;
constexpr int kConsumerRegs =
    min_of(kMostRegs, (kGivenRegs + (kGivenRegs - kProducerRegs) / kConsumers) / 8 * 8);

// Warpgroups take turns to issue products, each as many in a tile as the tile has blocks, less one.
// Named barriers, two for each warpgroup: from kTurn on those where its 128 threads wait for their
// turn, and those of the one before it arrive; from kBegun on those where its own vote.
constexpr bool kTakeTurns = kConsumers > 1;
constexpr int kTurn = 1;
constexpr int kBegun = kTurn + kConsumers;

// Whether warpgroups pass over blocks of their tile that a bound on the right hides from all their
// rows. Not beside a mask: the blocks of a tile are no run of numbers there, to be counted.
constexpr bool kPassHidden = kRight && !kMask && kConsumers > 1;

// Whether keys may be hidden that lie inside a row's bounds, up to all of them.
constexpr bool kHides = kMask || kBias != kNone;

// What O is divided by. To round weights and add them up takes 1.5 instructions more for each: not
// where more is computed for each score.
constexpr DivideBy kDivideBy = kOnes                          ? DivideBy::kProduct
                               : kHides || kAlibi || kDropout ? DivideBy::kL
                                                              : DivideBy::kRounded;

// Whether blocks that no bound cuts are weighed blind. With a bound on the left and a mask or a
// bias at once there are no registers for it.
constexpr bool kBlind = !kLeft || !kHides;

// Whether blocks that the mask leaves whole have code of their own. Beside a bias, which takes
// longer than the mask does, it would gain little.
constexpr bool kTellsCut = kMask && kBias == kNone;

struct Pipelines {
  TilePipeline<TileQ, kQBuffers> q;
  TilePipeline<TileK, kStages> k;
  TilePipeline<TileV, kStages, kSlabsV> v;
  TilePath<4 * kConsumers> path;

  static constexpr int kQ = 0;
  static constexpr int kK = kQ + kQBuffers * TileQ::kBytes;
  static constexpr int kV = kK + kStages * TileK::kBytes;
  static constexpr int kControl = kV + kStages * TileV::kBytes;
  static constexpr int kControlK = kControl + decltype(q)::kBarrierBytes;
  static constexpr int kControlV = kControlK + decltype(k)::kBarrierBytes;
  static constexpr int kControlPath = kControlV + decltype(v)::kBarrierBytes;
  static_assert(kControlPath + decltype(path)::kBytes <= kSmemBytes);

  DEVICE explicit Pipelines(u8* memory, u32 smem)
      : q(smem + kQ, smem + kControl),
        k(smem + kK, smem + kControlK),
        v(smem + kV, smem + kControlV),
        path(memory + kControlPath, smem + kControlPath) {}

  DEVICE void init() const {
    q.init(4 * kConsumers);
    k.init(4 * kConsumers);
    v.init(4 * kConsumers);
    path.init();
  }

  // By all threads. The product reads the first eight columns, which the swizzle has anywhere in
  // the rows of the slab.
  DEVICE void write_ones() const {
    for (int i = 0; i < kStages; ++i)
      TileV{v.tiles + i * TileV::kBytes}.fill_slab(kSlabsV, pack(1, 1));
    ptx::fence_proxy_async_shared();  // products read them
  }
};

// One thread loads, in the order in which consumers want it: K a block ahead of V, also across the
// end of a tile, for `end_and_begin`.
DEVICE void produce(const Params& p, Pipelines pipes) {
  int owed_block = -1;  // of V, whose K has been loaded
  int owed_head = 0, owed_batch = 0;
  const auto load_owed = [&] {
    if (owed_block >= 0) pipes.v.load(p.v_map, owed_block * kBlockN, owed_head, owed_batch);
    owed_block = -1;
  };
  pipes.path.produce(p, [&](JobKind kind, const Job& job) {
    if (!Job::is_tile(kind)) return load_owed();  // no other K comes before it
    const Tile tile = job.tile;
    const KeyRange keys = job.keys;
    for (int n = keys.last - 1; n >= keys.first; n = job.before(n).n) {
      pipes.k.load(p.k_map, n * kBlockN, tile.kv_head, tile.batch);
      load_owed();
      if (n == keys.last - 1) pipes.q.load(p.q_map, tile.row0, tile.head, tile.batch);
      owed_block = n, owed_head = tile.kv_head, owed_batch = tile.batch;
    }
  });
}

// A warpgroup's 64 rows of tile after tile.
struct Consumer {
  const Params& p;
  Pipelines pipes;
  const int warpgroup;
  OutputAndSums o;
  bool fresh;       // O of this tile has not begun: the next product is all of it
  Weights weights;  // P of the latest block, whose product with V is still to come
  BlindSoftmax<kDivideBy> softmax;

  DEVICE Consumer(const Params& params, Pipelines pipelines, int warpgroup)
      : p(params), pipes(pipelines), warpgroup(warpgroup), softmax(params) {}

  DEVICE void run() {
    JobKind kind = pipes.path.next();
    // The first turn is the first warpgroup's: it arrives in place of the one before, the last.
    if (kTakeTurns && warpgroup == 0) ptx::bar_arrive(kTurn, 256);
    while (kind != JobKind::kEnd) {
      if (kind == JobKind::kNothing) {
        pipes.path.give_back(false);
        kind = pipes.path.next();
        continue;
      }
      begin();
      while (true) {
        finish_keys();
        kind = pipes.path.next();
        if (kQBuffers == 1 || !Job::is_tile(kind)) break;
        // V of hidden blocks comes after that of the tile before, which is first to be given back.
        if (kPassHidden && hidden_blocks(pipes.path.latest()) > 0) break;
        end_and_begin();
      }
      end();
    }
  }

 private:
  // A job's key blocks for this warpgroup: a bound on the right may hide the last of the tile's. If
  // not, a reference, so that what is needed of them is read from the job then.
  DEVICE decltype(auto) own_keys(const Job& job) const {
    if constexpr (kPassHidden)
      return cut_right(p, job.keys, job.tile.row0 + 64 * warpgroup, 64);
    else
      return (job.keys);
  }
  DEVICE int hidden_blocks(const Job& job) const { return job.keys.last - own_keys(job).last; }

  // K and V of hidden blocks go back when they are there: to arrive before would count for what
  // their buffers held last. Turns go by blocks, so for each it takes one and passes it on.
  DEVICE void pass_hidden() {
    for (int n = hidden_blocks(pipes.path.due()); n > 0; --n) {
      take_turn();
      end_turn();
      pipes.k.wait_full();
      pipes.v.wait_full();
      ptx::bar_warp_sync();  // all lanes have seen them
      pipes.k.give_back();
      pipes.v.give_back();
    }
  }

  // One warpgroup's products run while another weighs. A tile's first S and last O take no turn.
  DEVICE void take_turn() const {
    if constexpr (kTakeTurns) ptx::bar_sync(kTurn + warpgroup, 256);
  }
  DEVICE void end_turn() const {
    if constexpr (kTakeTurns) ptx::bar_arrive(kTurn + (warpgroup + 1) % kConsumers, 256);
  }

  // S = Q K^T, and O += P V of the block before: both are issued, and S is there at the end.
  // Addresses are made before the wait, so that no product waits for them.
  DEVICE void multiply(Scores& s) {
    const TileQ q = pipes.q.tile();
    const TileK k = pipes.k.tile();
    const TileV v = pipes.v.tile();
    take_turn();
    pipes.k.wait_full();
    issue_nt<kHeadDim / 16>(s, q, 64 * warpgroup, k);
    pipes.v.wait_full();
    issue_nn(o, weights, v, !fresh);
    fresh = false;
    end_turn();
    ptx::wgmma_wait_group<1>();
  }

  // The last block of keys that the warpgroup sees, which is the first that it takes.
  DEVICE void begin() {
    if constexpr (kPassHidden) pass_hidden();
    Scores s;
    issue_first(s);
    weigh_first(s);
  }

  DEVICE void issue_first(Scores& s) {
    pipes.q.wait_full();
    pipes.k.wait_full();
    issue_nt<kHeadDim / 16>(s, pipes.q.tile(), 64 * warpgroup, pipes.k.tile());
  }

  DEVICE void weigh_first(Scores& s) {
    const Job& job = pipes.path.due();
    const KeyRange& keys = own_keys(job);
    const KeyBlock block = job.block(keys.last - 1);
    ScoreInputs<Scores, kMask> inputs;
    inputs.load(p, job.tile, job.mask, block);
    ptx::wgmma_wait_group<0>();
    pipes.k.give_back();
    if (before(job, block.n).n < keys.first) pipes.q.give_back();
    inputs.modify(s, p, job.tile, block);
    if (keys.is_cut(block.n)) apply_bounds(s, p, job.tile, block.n * kBlockN);
    inputs.hide(s);
    softmax.begin(s);
    drop_weights(s, p, job.tile, block.n * kBlockN);
    weights = narrow(s);
    fresh = true;
  }

  // All other blocks, down to the first: some that bounds on the right cut, or until every row has
  // seen a key; then blind ones, which lie inside every row's bounds; then some that bounds on the
  // left cut. None is blind the second time. None is hidden: `before` passes over those.
  DEVICE void finish_keys() {
    const Job& job = pipes.path.due();
    const KeyRange keys = own_keys(job);
    const int blind_last = job.kind == JobKind::kAgain ? keys.first : keys.whole_last;
    const int blind_first = max_of(keys.first, keys.whole_first);
    KeyBlock block = before(job, keys.last - 1);
    while (block.n >= keys.first && (!kBlind || block.n >= blind_last || !has_begun(job.tile)))
      block = step<false, kMask>(job, block, keys.first);
    if constexpr (kBlind) {
      while (block.n >= blind_first)
        block = !kTellsCut || block.mask == kCut ? step<true, kMask>(job, block, keys.first)
                                                 : step<true, false>(job, block, keys.first);
      if constexpr (kLeft)
        while (block.n >= keys.first) block = step<false, kMask>(job, block, keys.first);
    }
  }

  // Whether all rows of the warpgroup have an m, by which blocks can be weighed blind.
  DEVICE bool has_begun(const Tile& tile) const {
    if constexpr (!kHides) return true;
    const bool has = softmax.template has_begun<Scores>(p, tile);
    return !uniform(ptx::bar_red_or(!has, kBegun + warpgroup, 128));
  }

  // The block that a job takes after block n, the same in all lanes.
  DEVICE static KeyBlock before(const Job& job, int n) {
    const KeyBlock block = job.before(n);
    if constexpr (!kMask) return block;
    return {uniform(block.n), BlockMask(uniform(block.mask))};
  }

  // A block is weighed while O += P V of the one before is under way; returns the next one. kMasks:
  // the mask may hide keys of it.
  template <bool kIsBlind, bool kMasks>
  DEVICE KeyBlock step(const Job& job, KeyBlock block, int first) {
    const KeyBlock next = before(job, block.n);
    ScoreInputs<Scores, kMasks> inputs;
    inputs.load(p, job.tile, job.mask, block);
    Scores s;
    multiply(s);
    if (next.n < first) pipes.q.give_back();
    inputs.modify(s, p, job.tile, block);
    bool moved = false;
    Real factors[2];
    const auto follow = [&](int r, Real factor) { moved = true, factors[r] = factor; };
    if constexpr (kIsBlind) {
      inputs.hide(s);
      softmax.update_blind(s, follow);
    } else {
      // Such blocks are few: let O be done, so that the weights' registers are free.
      ptx::wgmma_wait_group<0>();
      apply_bounds(s, p, job.tile, block.n * kBlockN);
      inputs.hide(s);
      if constexpr (kOnes && kMayShrink) softmax.take_sums(o, Output::kCols);
      softmax.update_apart(s, follow);
    }
    pipes.k.give_back();
    drop_weights(s, p, job.tile, block.n * kBlockN);
    ptx::wgmma_wait_group<0>();  // O is there, and the weights may be overwritten
    pipes.v.give_back();
    weights = narrow(s);
    if (moved) {
#pragma unroll
      for (int r = 0; r < 2; ++r) scale_row(o, r, factors[r]);
    }
    return next;
  }

  DEVICE void issue_last() {
    pipes.v.wait_full();
    issue_nn(o, weights, pipes.v.tile(), !fresh);
  }

  DEVICE void end() {
    issue_last();
    store<0>();
  }

  // `end`, with the first product of the next tile under it.
  DEVICE void end_and_begin() {
    Scores s;
    issue_last();
    issue_first(s);
    store<1>();
    weigh_first(s);
  }

  // O alone: the softmax takes the sums that may stand behind it.
  DEVICE decltype(auto) take_sums() {
    if constexpr (kOnes) {
      Output out;
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int c = 0; c < Output::kCols; ++c) out.at(r, c) = o.at(r, c);
      softmax.take_sums(o, Output::kCols);
      return out;
    } else {
      return (o);
    }
  }

  // Stores the results once at most kPending products are under way: the first time not those of a
  // warp that gives up, the second time those alone. What is not to be stored lies past the end,
  // since a branch around the results would cost more.
  template <int kPending> DEVICE void store() {
    const Job& job = pipes.path.due();
    ptx::wgmma_wait_group<kPending>();
    pipes.v.give_back();
    auto&& out = take_sums();
    Real factors[2], lse[2];
    softmax.template end_rows<Output::kRowLanes>(p, job.tile, factors, lse);
    const bool again = job.kind == JobKind::kAgain;
    bool give_up = false;
    if (kBlind && softmax.is_doubtful(out, p, job.tile)) {
      give_up = !again && softmax.is_lost(out, p, job.tile);
      softmax.move_to_top(out);
      softmax.template end_rows<Output::kRowLanes>(p, job.tile, factors, lse);
    }
    Tile tile = job.tile;
    if (give_up || (again && !pipes.path.gave_up())) tile.row0 = p.seqlen_q;
#pragma unroll
    for (int r = 0; r < 2; ++r) scale_row(out, r, factors[r]);
    store_output(out, p, tile);
    store_lse(out, lse, p, tile);
    pipes.path.give_back(give_up);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
fa3_fwd_sm90(const __grid_constant__ Params p) {
  const Pipelines pipes(ptx::dynamic_smem(), ptx::smem_address(ptx::dynamic_smem()));
  if (ptx::tid_x() == 0) {
    pipes.init();
    ptx::fence_mbarrier_init();
  }
  if constexpr (kOnes) pipes.write_ones();
  ptx::bar_sync();  // all see the barriers, and the ones
  const int warpgroup = uniform(ptx::tid_x() / 128);
  if (warpgroup == kConsumers) {
    ptx::setmaxnreg_dec<kProducerRegs>();
    if (warp() == 4 * kConsumers && ptx::elect_sync()) produce(p, pipes);
  } else {
    ptx::setmaxnreg_inc<kConsumerRegs>();
    Consumer(p, pipes, warpgroup).run();
  }
}
