// Training of many small networks: one thread block takes one network through its steps.
//
// The generator (fused_source.py) puts in front of this text how many threads there are and one structure for every
// layer and every buffer, and behind it the sequence of passes over one group of samples. All sizes are known when it
// is compiled. Shared memory holds the activations of a group of samples and the weights of convolutions; the weights
// of dense layers stay in global memory, where the cache holds them.
//
// No sum depends on which block or when: the same network takes the same steps bit for bit. Compiled as plain C++ the
// same text runs on a CPU, with threads in the place of a block's, which is how it is tested without a GPU.

#define UNROLL _Pragma("unroll")
#define ONCE _Pragma("unroll 1")
#ifdef __CUDACC_RTC__
#define DEVICE static __device__ __forceinline__
typedef unsigned char u8;
DEVICE void barrier() { __syncthreads(); }
DEVICE float across(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
#else
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>
#undef UNROLL
#undef ONCE
#define UNROLL
#define ONCE
#define DEVICE static inline
typedef unsigned char u8;
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
static thread_local int own_thread = 0;
static std::unique_ptr<std::barrier<>> all_threads;
static std::vector<std::unique_ptr<std::barrier<>>> warps;
static float exchanged[THREADS];
DEVICE void barrier() { if (THREADS > 1) all_threads->arrive_and_wait(); }
DEVICE float across(float value, int mask) {
  auto& warp = *warps[own_thread / LANES];
  exchanged[own_thread] = value;
  warp.arrive_and_wait();
  float other = exchanged[own_thread ^ mask];
  warp.arrive_and_wait();
  return other;
}
#endif

constexpr int WARPS = THREADS / LANES;

// One launch: what the host passes. Arrays over networks unless said otherwise.
struct Job {
  const float* images;       // the bank: image after image
  const int* order;          // (networks, samples): images in the order of the epoch
  const int* labels;         // (networks, samples): their classes
  float* weights;            // (networks, WEIGHTS), packed as the generator says
  float* velocity;           // the same, or null without momentum
  float* gradients;          // (blocks, WEIGHTS): sums over the groups of a batch
  const float* rate;
  const float* momentum;
  const float* decay;
  const int* batch;
  const int* turn;           // networks in the order in which they are taken
  int* finished;             // slices that each network has behind it
  int* queue;                // one counter: the next piece of work
  int* bad;                  // set where a loss is not finite
  double* losses;            // (networks, slices, warps): sums over samples, in training over means of batches
  int* wrong;                // the same, of an evaluation
  int networks, samples, slices, evaluates;
  int order_step, label_step;  // `samples`, or 0 where all networks have the same
};

struct Thread {
  int id, lane, warp;
};

#ifdef __CUDACC_RTC__
extern __shared__ __align__(16) float memory[];
#else
alignas(16) static float memory[SHARED_FLOATS];
#endif

DEVICE float add_product(float a, float b, float c) {
#ifdef __CUDACC_RTC__
  return fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

DEVICE float rectified(float value) { return value < 0.f ? 0.f : value; }  // keeps NaN

DEVICE float warp_sum(float value) {
  UNROLL for (int mask = LANES / 2; mask > 0; mask /= 2) value += across(value, mask);
  return value;
}

DEVICE float warp_max(float value) {
  UNROLL for (int mask = LANES / 2; mask > 0; mask /= 2) {
    float other = across(value, mask);
    value = other > value || other != other ? other : value;
  }
  return value;
}

// Sums of M values over the lanes (M a power of two). Lane l ends with the sums number `first` and following.
template <int M> struct Sums {
  static constexpr int LEFT = M > LANES ? M / LANES : 1;
  DEVICE int reduce(float (&values)[M], int lane) {
    int first = 0, held = M;
    UNROLL for (int mask = LANES / 2; mask > 0; mask /= 2) {
      if (held > 1) {
        held /= 2;
        bool upper = lane & mask;
        first += upper ? held : 0;
        UNROLL for (int i = 0; i < M / 2; i++) if (i < held) {
          float kept = upper ? values[i + held] : values[i], sent = upper ? values[i] : values[i + held];
          values[i] = kept + across(sent, mask);
        }
      } else {
        values[0] += across(values[0], mask);
      }
    }
    return first;
  }
};

// Several floats at once. A GPU stops at an address that is not a multiple of their size; so does this on a CPU.
template <class T> DEVICE T& at(float* place) {
#ifndef __CUDACC_RTC__
  if (reinterpret_cast<std::uintptr_t>(place) % sizeof(T)) std::abort();
#endif
  return *reinterpret_cast<T*>(place);
}
template <class T> DEVICE T at(const float* place) { return at<T>(const_cast<float*>(place)); }

template <int N, int AT_ONCE = N % 4 == 0 ? 4 : N % 2 == 0 ? 2 : 1> DEVICE void load(float (&to)[N], const float* from) {
  if constexpr (AT_ONCE == 4) {
    UNROLL for (int i = 0; i < N; i += 4) {
      const float4 part = at<float4>(from + i);
      to[i] = part.x, to[i + 1] = part.y, to[i + 2] = part.z, to[i + 3] = part.w;
    }
  } else if constexpr (AT_ONCE == 2) {
    UNROLL for (int i = 0; i < N; i += 2) {
      const float2 part = at<float2>(from + i);
      to[i] = part.x, to[i + 1] = part.y;
    }
  } else {
    UNROLL for (int i = 0; i < N; i++) to[i] = from[i];
  }
}

// Places of entry (channel, row, column) of sample s: its value, its derivative, the mark that pooling left.
template <class A> DEVICE int value_at(int s, int c, int y, int x) {
  return A::START + s * A::SAMPLE + c * A::PLANE + (y + A::PAD_Y) * A::PITCH + x + A::PAD_X;
}
template <class A> DEVICE int slope_at(int s, int c, int cell) {
  return A::SLOPE + s * A::SLOPE_SAMPLE + c * A::SLOPE_CHANNEL + cell;
}
template <class A> DEVICE const u8* marks_of(int s, int c) {
  return reinterpret_cast<const u8*>(memory + A::MARKS) + s * A::MARKS_SAMPLE + c * A::SLOPE_CHANNEL;
}

// Derivative of the loss by an activation, through its ReLU.
template <class A> DEVICE void put_slope(int s, int c, int y, int x, float slope) {
  bool dead = A::RECTIFIED && memory[value_at<A>(s, c, y, x)] <= 0.f;
  memory[slope_at<A>(s, c, y * A::WIDTH + x)] = dead ? 0.f : slope;
}

template <class A> DEVICE void load_images(const Thread& t, const float* images, const int* order, int n) {
  constexpr int EACH = A::WIDTH % 4 == 0 ? 4 : 1, SIZE = A::CHANNELS * A::HEIGHT * A::WIDTH, COUNT = SIZE / EACH;
  constexpr int AT_ONCE = 4;  // reads under way before the first is needed
  for (int start = t.id; start < n * COUNT; start += THREADS * AT_ONCE) {
    float part[AT_ONCE][EACH];
    UNROLL for (int i = 0; i < AT_ONCE; i++) {
      const int item = start + i * THREADS, s = item / COUNT;
      if (item < n * COUNT) load<EACH>(part[i], images + (long long)order[s] * SIZE + item % COUNT * EACH);
    }
    UNROLL for (int i = 0; i < AT_ONCE; i++) {
      const int item = start + i * THREADS, s = item / COUNT, e = item % COUNT * EACH;
      if (item >= n * COUNT) break;
      float* to = memory + value_at<A>(s, e / (A::HEIGHT * A::WIDTH), e / A::WIDTH % A::HEIGHT, e % A::WIDTH);
      UNROLL for (int j = 0; j < EACH; j++) to[j] = part[i][j];
    }
  }
}

// Floats from the first input of a pooling window to that of its entry k: the mark that a maximum leaves.
template <class L, class In> DEVICE constexpr int way_to(int k) {
  return k / L::TILE_X * L::STRIDE_Y * In::PITCH + k % L::TILE_X * L::STRIDE_X;
}

// Convolution, ReLU and pooling. A thread computes CB channels of one tile of outputs; a tile is what one pooled value
// is taken from, or 2×2 without pooling. SPLIT neighbouring lanes share the input channels of one such piece of work.
template <class L, class In, class Out> DEVICE void conv_forward(const Thread& t, int n) {
  constexpr int TY = L::TILE_Y, TX = L::TILE_X, CB = L::CB, SPLIT = L::SPLIT;
  constexpr int ROWS = (TY - 1) * L::STRIDE_Y + L::KY, COLUMNS = (TX - 1) * L::STRIDE_X + L::KX;
  constexpr int DOWN = L::POOL ? Out::HEIGHT : (Out::HEIGHT + TY - 1) / TY;
  constexpr int ALONG = L::POOL ? Out::WIDTH : (Out::WIDTH + TX - 1) / TX;
  constexpr bool PAIRS = COLUMNS % 2 == 0 && In::PITCH % 2 == 0 && In::PLANE % 2 == 0 && In::SAMPLE % 2 == 0 &&
                         (TX * L::STRIDE_X) % 2 == 0;
  const int of_block = n * DOWN * ALONG, count = of_block * (L::COUT_PAD / CB) * SPLIT;
  ONCE for (int start = t.warp * LANES; start < count; start += THREADS) {
    const bool valid = start + t.lane < count;
    const int item = valid ? start + t.lane : count - 1, part = item % SPLIT;
    const int block = item / SPLIT / of_block, place = item / SPLIT % of_block;
    const int tx = place % ALONG, ty = place / ALONG % DOWN, s = place / (ALONG * DOWN);
    const float* in = memory + In::START + s * In::SAMPLE + ty * (TY * L::STRIDE_Y) * In::PITCH + tx * (TX * L::STRIDE_X);
    const float* weights = memory + L::SHARED + block * CB;
    float sums[TY * TX][CB];
    UNROLL for (int b = 0; b < CB; b++) {
      float bias = L::BIAS && part == 0 ? weights[L::TAPS * L::COUT_PAD + b] : 0.f;
      UNROLL for (int k = 0; k < TY * TX; k++) sums[k][b] = bias;
    }
    ONCE for (int c = part; c < L::CIN; c += SPLIT) {
      float window[ROWS][COLUMNS];
      UNROLL for (int r = 0; r < ROWS; r++) {
        const float* row = in + c * In::PLANE + r * In::PITCH;
        load<COLUMNS, PAIRS ? 2 : 1>(window[r], row);
      }
      const float* taps = weights + c * (L::KY * L::KX * L::COUT_PAD);
      UNROLL for (int ky = 0; ky < L::KY; ky++) UNROLL for (int kx = 0; kx < L::KX; kx++) {
        float tap[CB];
        load<CB>(tap, taps + (ky * L::KX + kx) * L::COUT_PAD);
        UNROLL for (int y = 0; y < TY; y++) UNROLL for (int x = 0; x < TX; x++) UNROLL for (int b = 0; b < CB; b++)
          sums[y * TX + x][b] =
              add_product(window[y * L::STRIDE_Y + ky][x * L::STRIDE_X + kx], tap[b], sums[y * TX + x][b]);
      }
    }
    UNROLL for (int mask = 1; mask < SPLIT; mask *= 2)
      UNROLL for (int k = 0; k < TY * TX; k++) UNROLL for (int b = 0; b < CB; b++)
        sums[k][b] += across(sums[k][b], mask);
    if (!valid || part) continue;
    UNROLL for (int b = 0; b < CB; b++) {
      const int channel = block * CB + b;
      if (channel >= L::COUT) break;
      if constexpr (L::POOL == 0) {
        UNROLL for (int y = 0; y < TY; y++) UNROLL for (int x = 0; x < TX; x++)
          if (ty * TY + y < Out::HEIGHT && tx * TX + x < Out::WIDTH)
            memory[value_at<Out>(s, channel, ty * TY + y, tx * TX + x)] =
                Out::RECTIFIED ? rectified(sums[y * TX + x][b]) : sums[y * TX + x][b];
      } else {
        float pooled = L::POOL == 1 ? sums[0][b] : 0.f;
        int mark = 0;
        UNROLL for (int k = 0; k < TY * TX; k++) {
          float value = sums[k][b];
          if constexpr (L::POOL == 1) {  // the first of the largest
            bool larger = value > pooled || value != value;
            pooled = larger ? value : pooled;
            mark = larger ? way_to<L, In>(k) : mark;
          } else {
            if (L::RECTIFIED_FIRST) value = rectified(value);
            mark |= !L::RECTIFIED_FIRST || value > 0.f ? 1 << k : 0;
            pooled += value * (1.f / (TY * TX));
          }
        }
        memory[value_at<Out>(s, channel, ty, tx)] = Out::RECTIFIED ? rectified(pooled) : pooled;
        const_cast<u8*>(marks_of<Out>(s, channel))[ty * Out::WIDTH + tx] = mark;
      }
    }
  }
}

DEVICE constexpr int floor_div(int a, int b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

// What an output entry (k within its pooling window) received of the derivative by the pooled value.
template <class L, class In> DEVICE float received(float slope, int mark, int k) {
  if (L::POOL == 0) return slope;
  if (L::POOL == 1) return mark == way_to<L, In>(k) ? slope : 0.f;
  return mark >> k & 1 ? slope * (1.f / (L::TILE_Y * L::TILE_X)) : 0.f;
}

// Derivatives by a convolution's inputs. A thread computes BACK_CB channels of a tile of BACK_Y×BACK_X inputs; SPLIT
// neighbouring lanes share the output channels.
template <class L, class In, class Out> DEVICE void conv_backward(const Thread& t, int n) {
  constexpr int TY = L::BACK_Y, TX = L::BACK_X, CB = L::BACK_CB, SPLIT = L::BACK_SPLIT;
  constexpr int PY = L::POOL ? L::TILE_Y : 1, PX = L::POOL ? L::TILE_X : 1;
  constexpr int Y0 = -floor_div(L::KY - 1 - In::PAD_Y, L::STRIDE_Y), Y1 = floor_div(TY - 1 + In::PAD_Y, L::STRIDE_Y);
  constexpr int X0 = -floor_div(L::KX - 1 - In::PAD_X, L::STRIDE_X), X1 = floor_div(TX - 1 + In::PAD_X, L::STRIDE_X);
  constexpr int CY0 = floor_div(Y0, PY), CY1 = floor_div(Y1, PY), CX0 = floor_div(X0, PX), CX1 = floor_div(X1, PX);
  constexpr int DOWN = (In::HEIGHT + TY - 1) / TY, ALONG = (In::WIDTH + TX - 1) / TX;
  const int of_block = n * DOWN * ALONG, count = of_block * (L::CIN_PAD / CB) * SPLIT;
  ONCE for (int start = t.warp * LANES; start < count; start += THREADS) {
    const bool valid = start + t.lane < count;
    const int item = valid ? start + t.lane : count - 1, part = item % SPLIT;
    const int block = item / SPLIT / of_block, place = item / SPLIT % of_block;
    const int tx = place % ALONG, ty = place / ALONG % DOWN, s = place / (ALONG * DOWN);
    const int cy = ty * (TY / L::STRIDE_Y / PY), cx = tx * (TX / L::STRIDE_X / PX);
    const float* weights = memory + L::TRANSPOSED + block * CB;
    float sums[TY * TX][CB];
    UNROLL for (int k = 0; k < TY * TX; k++) UNROLL for (int b = 0; b < CB; b++) sums[k][b] = 0.f;
    ONCE for (int c = part; c < L::COUT; c += SPLIT) {
      const float* slopes = memory + slope_at<Out>(s, c, 0);
      const u8* marks = marks_of<Out>(s, c);
      float window[Y1 - Y0 + 1][X1 - X0 + 1];
      UNROLL for (int dy = CY0; dy <= CY1; dy++) UNROLL for (int dx = CX0; dx <= CX1; dx++) {
        const int y = cy + dy, x = cx + dx, cell = y * Out::WIDTH + x;
        const bool inside = y >= 0 && y < Out::HEIGHT && x >= 0 && x < Out::WIDTH;
        const float slope = inside ? slopes[cell] : 0.f;
        const int mark = L::POOL && inside ? marks[cell] : 0;
        UNROLL for (int ky = 0; ky < PY; ky++) UNROLL for (int kx = 0; kx < PX; kx++) {
          const int row = dy * PY + ky - Y0, column = dx * PX + kx - X0;
          if (row >= 0 && row <= Y1 - Y0 && column >= 0 && column <= X1 - X0)
            window[row][column] = received<L, In>(slope, mark, ky * PX + kx);
        }
      }
      const float* taps = weights + c * (L::KY * L::KX * L::CIN_PAD);
      UNROLL for (int ky = 0; ky < L::KY; ky++) UNROLL for (int kx = 0; kx < L::KX; kx++) {
        float tap[CB];
        load<CB>(tap, taps + (ky * L::KX + kx) * L::CIN_PAD);
        UNROLL for (int y = 0; y < TY; y++) UNROLL for (int x = 0; x < TX; x++) {
          const int above = y + In::PAD_Y - ky, before = x + In::PAD_X - kx;
          if (above % L::STRIDE_Y == 0 && before % L::STRIDE_X == 0) {
            const int row = above / L::STRIDE_Y - Y0, column = before / L::STRIDE_X - X0;
            UNROLL for (int b = 0; b < CB; b++)
              sums[y * TX + x][b] = add_product(window[row][column], tap[b], sums[y * TX + x][b]);
          }
        }
      }
    }
    UNROLL for (int mask = 1; mask < SPLIT; mask *= 2)
      UNROLL for (int k = 0; k < TY * TX; k++) UNROLL for (int b = 0; b < CB; b++)
        sums[k][b] += across(sums[k][b], mask);
    if (!valid || part) continue;
    UNROLL for (int b = 0; b < CB; b++) UNROLL for (int y = 0; y < TY; y++) UNROLL for (int x = 0; x < TX; x++) {
      const int row = ty * TY + y, column = tx * TX + x;
      if (block * CB + b < L::CIN && row < In::HEIGHT && column < In::WIDTH)
        put_slope<In>(s, block * CB + b, row, column, sums[y * TX + x][b]);
    }
  }
}

// Derivatives by a convolution's weights, into the scratch memory: one part for each share of the samples. The lanes of
// a warp are taps, so that a derivative is read once for all of them: BY_ROW: (channel, column) with a register for
// every row, else (row, column) with a register for every channel.
template <class L, class In, class Out> DEVICE void conv_weights(const Thread& t, int n) {
  constexpr int ACROSS = (L::BY_ROW ? L::CIN : L::KY) * L::KX, ROUNDS = L::BY_ROW ? L::KY : L::CIN;
  constexpr int ROUND = L::BY_ROW ? In::PITCH : In::PLANE, R = L::ROUNDS_AT_ONCE, CB = L::WEIGHTS_CB;
  constexpr int LANE_BLOCKS = (ACROSS + LANES - 1) / LANES, ROUND_BLOCKS = (ROUNDS + R - 1) / R;
  constexpr int BLOCKS = (L::COUT + CB - 1) / CB, CELLS = Out::HEIGHT * Out::WIDTH, FOURS = Out::SLOPE_CHANNEL / 4;
  constexpr int PY = L::POOL ? L::TILE_Y : 1, PX = L::POOL ? L::TILE_X : 1, KINDS = L::POOL == 2 ? PY * PX : 1;
  ONCE for (int task = t.warp; task < LANE_BLOCKS * ROUND_BLOCKS * BLOCKS * L::SHARES; task += WARPS) {
    const int share = task % L::SHARES, block = task / L::SHARES % BLOCKS;
    const int rounds = task / (L::SHARES * BLOCKS) % ROUND_BLOCKS * R;
    const int tap = task / (L::SHARES * BLOCKS * ROUND_BLOCKS) * LANES + t.lane;
    const int kx = tap % L::KX, other = tap / L::KX;
    const int offset = tap < ACROSS ? other * (L::BY_ROW ? In::PLANE : In::PITCH) + kx : 0;
    const float* in = memory + In::START + offset + rounds * ROUND;
    float sums[R][CB];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int b = 0; b < CB; b++) sums[r][b] = 0.f;
    const int total = n * FOURS;
    ONCE for (int four = share * total / L::SHARES; four < (share + 1) * total / L::SHARES; four++) {
      const int s = four / FOURS, first = four % FOURS * 4;
      int base[4];
      UNROLL for (int j = 0; j < 4; j++) {
        const int cell = first + j < CELLS ? first + j : CELLS - 1;  // beyond, derivatives are 0 but memory is not
        base[j] = s * In::SAMPLE + cell / Out::WIDTH * (PY * L::STRIDE_Y) * In::PITCH + cell % Out::WIDTH * (PX * L::STRIDE_X);
      }
      UNROLL for (int b = 0; b < CB; b++) {
        const int channel = block * CB + b < L::COUT ? block * CB + b : L::COUT - 1;
        float slope[4];
        load<4>(slope, memory + slope_at<Out>(s, channel, first));
        const unsigned marks =
            L::POOL ? *reinterpret_cast<const unsigned*>(marks_of<Out>(s, channel) + first) : 0u;
        UNROLL for (int j = 0; j < 4; j++) UNROLL for (int kind = 0; kind < KINDS; kind++) {
          const int mark = marks >> (8 * j) & 255;
          const float value = L::POOL == 2 ? received<L, In>(slope[j], mark, kind) : slope[j];
          const float* from = in + base[j] + (L::POOL == 1 ? mark : L::POOL == 2 ? way_to<L, In>(kind) : 0);
          UNROLL for (int r = 0; r < R; r++)
            if (ROUNDS % R == 0 || rounds + r < ROUNDS) sums[r][b] = add_product(value, from[r * ROUND], sums[r][b]);
        }
      }
    }
    if (tap >= ACROSS) continue;
    float* to = memory + SCRATCH + share * L::SIZE;
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int b = 0; b < CB; b++) {
      const int round = rounds + r, channel = block * CB + b;
      if (round >= ROUNDS || channel >= L::COUT) continue;
      const int row = L::BY_ROW ? (other * L::KY + round) * L::KX + kx : (round * L::KY + other) * L::KX + kx;
      to[row * L::COUT_PAD + channel] = sums[r][b];
    }
  }
  if (!L::BIAS) return;
  ONCE for (int channel = WARPS - 1 - t.warp; channel < L::COUT; channel += WARPS) {
    float sum = 0.f;
    for (int s = 0; s < n; s++)
      for (int cell = t.lane; cell < CELLS; cell += LANES) {
        const float slope = memory[slope_at<Out>(s, channel, cell)];
        float share = L::POOL == 2 ? 0.f : slope;
        if (L::POOL == 2)
          UNROLL for (int k = 0; k < KINDS; k++) share += received<L, In>(slope, marks_of<Out>(s, channel)[cell], k);
        sum += share;
      }
    sum = warp_sum(sum);
    for (int share = t.lane; share < L::SHARES; share += LANES)
      memory[SCRATCH + share * L::SIZE + L::TAPS * L::COUT_PAD + channel] = share ? 0.f : sum;
  }
}

struct Settings {
  float rate, momentum, decay;
};

// w ← w − rate·v with v ← momentum·v + gradient + decay·w.
DEVICE float stepped(const Settings& by, float weight, float gradient, float& velocity) {
  float step = add_product(by.decay, weight, gradient);
  if (by.momentum != 0.f) step = velocity = add_product(by.momentum, velocity, step);
  return add_product(-by.rate, step, weight);
}

// Sum of the shares; at the end of a batch the step.
template <class L>
DEVICE void conv_step(const Thread& t, const Settings& by, float* velocity, bool first, bool last) {
  for (int e = t.id; e < L::SIZE; e += THREADS) {
    const int channel = e % L::COUT_PAD, tap = e / L::COUT_PAD;
    if (channel >= L::COUT) continue;
    float gradient = first ? 0.f : memory[L::SUMS + e];
    UNROLL for (int share = 0; share < L::SHARES; share++) gradient += memory[SCRATCH + share * L::SIZE + e];
    if (!last) {
      memory[L::SUMS + e] = gradient;
      continue;
    }
    float speed = by.momentum != 0.f ? velocity[L::PACKED + e] : 0.f;
    const float weight = stepped(by, memory[L::SHARED + e], gradient, speed);
    if (by.momentum != 0.f) velocity[L::PACKED + e] = speed;
    memory[L::SHARED + e] = weight;
    if (L::TRANSPOSED && tap < L::TAPS) {
      const int c = tap / (L::KY * L::KX), k = tap % (L::KY * L::KX);
      memory[L::TRANSPOSED + (channel * (L::KY * L::KX) + k) * L::CIN_PAD + c] = weight;
    }
  }
}

template <class L> DEVICE void conv_fetch(const Thread& t, const float* weights) {
  for (int e = t.id; e < L::SIZE; e += THREADS) {
    const int channel = e % L::COUT_PAD, tap = e / L::COUT_PAD;
    memory[L::SHARED + e] = weights[L::PACKED + e];
    if (L::TRANSPOSED && tap < L::TAPS && channel < L::COUT) {
      const int c = tap / (L::KY * L::KX), k = tap % (L::KY * L::KX);
      memory[L::TRANSPOSED + (channel * (L::KY * L::KX) + k) * L::CIN_PAD + c] = weights[L::PACKED + e];
    }
  }
}

template <class L> DEVICE void conv_return(const Thread& t, float* weights) {
  for (int e = t.id; e < L::SIZE; e += THREADS) weights[L::PACKED + e] = memory[L::SHARED + e];
}

// Dense layer: a warp computes CB outputs of all samples, its lanes sharing the inputs. The bias is one more input,
// which is 1; rows are filled up to ROW, a multiple of 4.
template <class L, class In, class Out, int N> DEVICE void dense_forward(const Thread& t, const float* weights) {
  constexpr int CB = L::CB, NP = N <= 1 ? 1 : N <= 2 ? 2 : N <= 4 ? 4 : 8;
  ONCE for (int first = t.warp * CB; first < L::OUT; first += WARPS * CB) {
    float sums[CB * NP];
    UNROLL for (int i = 0; i < CB * NP; i++) sums[i] = 0.f;
    for (int k = t.lane * 4; k < L::ROW; k += LANES * 4) {
      float row[CB][4];
      UNROLL for (int b = 0; b < CB; b++) {
        const int o = first + b < L::OUT ? first + b : L::OUT - 1;
        load<4>(row[b], weights + L::PACKED + o * L::ROW + k);
      }
      UNROLL for (int s = 0; s < N; s++) {
        float value[4];
        load<4>(value, memory + In::START + s * In::SAMPLE + k);
        UNROLL for (int b = 0; b < CB; b++) UNROLL for (int j = 0; j < 4; j++)
          sums[b * NP + s] = add_product(row[b][j], value[j], sums[b * NP + s]);
      }
    }
    const int mine = Sums<CB * NP>::reduce(sums, t.lane);
    UNROLL for (int i = 0; i < Sums<CB * NP>::LEFT; i++) {
      const int o = first + (mine + i) / NP, s = (mine + i) % NP;
      if (o < L::OUT && s < N) memory[Out::START + s * Out::SAMPLE + o] = Out::RECTIFIED ? rectified(sums[i]) : sums[i];
    }
  }
}

// Derivatives of a dense layer: a thread has four inputs and every SHARES-th output. It sums up the derivatives by its
// inputs (into the scratch memory) and, since it has read them, at the end of a batch changes the weights.
template <class L, class In, class Out, int N>
DEVICE void dense_backward(const Thread& t, const Settings& by, float* weights, float* velocity, float* gradients,
                           bool first, bool last) {
  constexpr int COLUMNS = L::ROW / 4, AT_ONCE = 4;
  ONCE for (int item = t.id; item < COLUMNS * L::SHARES; item += THREADS) {
    const int k = item % COLUMNS * 4, share = item / COLUMNS;
    float value[N][4], slope[N][4];
    UNROLL for (int s = 0; s < N; s++) {
      load<4>(value[s], memory + In::START + s * In::SAMPLE + k);
      UNROLL for (int j = 0; j < 4; j++) slope[s][j] = 0.f;
    }
    ONCE for (int begin = share; begin < L::OUT; begin += L::SHARES * AT_ONCE) {
      float4 weight[AT_ONCE], sum[AT_ONCE], speed[AT_ONCE];
      UNROLL for (int i = 0; i < AT_ONCE; i++) {
        const int o = begin + i * L::SHARES, place = L::PACKED + (o < L::OUT ? o : begin) * L::ROW + k;
        weight[i] = at<float4>(weights + place);
        sum[i] = speed[i] = float4{0.f, 0.f, 0.f, 0.f};
        if (!first) sum[i] = at<float4>(gradients + place);
        if (last && by.momentum != 0.f) speed[i] = at<float4>(velocity + place);
      }
      UNROLL for (int i = 0; i < AT_ONCE; i++) {
        const int o = begin + i * L::SHARES, place = L::PACKED + o * L::ROW + k;
        if (o >= L::OUT) break;
        float given[(N + 3) / 4 * 4];
        load<(N + 3) / 4 * 4>(given, memory + slope_at<Out>(0, o, 0));
        float* w = &weight[i].x;
        float* g = &sum[i].x;
        float* v = &speed[i].x;
        UNROLL for (int s = 0; s < N; s++) UNROLL for (int j = 0; j < 4; j++) {
          slope[s][j] = add_product(given[s], w[j], slope[s][j]);
          g[j] = add_product(given[s], value[s][j], g[j]);
        }
        if (last) {
          UNROLL for (int j = 0; j < 4; j++) w[j] = stepped(by, w[j], g[j], v[j]);
          at<float4>(weights + place) = weight[i];
          if (by.momentum != 0.f) at<float4>(velocity + place) = speed[i];
        } else {
          at<float4>(gradients + place) = sum[i];
        }
      }
    }
    if (!L::IS_FIRST)
      UNROLL for (int s = 0; s < N; s++) at<float4>(memory + SCRATCH + (share * N + s) * L::ROW + k) =
          float4{slope[s][0], slope[s][1], slope[s][2], slope[s][3]};
  }
  if (L::IS_FIRST) return;
  barrier();
  constexpr int PLANE = In::HEIGHT * In::WIDTH;
  for (int item = t.id; item < N * L::IN; item += THREADS) {
    const int s = item / L::IN, e = item % L::IN;
    float slope = 0.f;
    UNROLL for (int share = 0; share < L::SHARES; share++) slope += memory[SCRATCH + (share * N + s) * L::ROW + e];
    put_slope<In>(s, e / PLANE, e % PLANE / In::WIDTH, e % In::WIDTH, slope);
  }
}

// Softmax and cross-entropy: the derivative by the outputs, scaled to the mean of a batch, or loss and error.
template <class Out> DEVICE void cross_entropy_slopes(const Thread& t, const int* labels, int n, float scale, double& total, int* bad) {
  for (int s = t.warp; s < GROUP; s += WARPS) {
    const float* outputs = memory + Out::START + s * Out::SAMPLE;
    const int label = s < n ? labels[s] : 0;
    float largest = outputs[0], sum = 0.f;
    for (int c = t.lane; c < CLASSES; c += LANES) largest = outputs[c] > largest ? outputs[c] : largest;
    largest = warp_max(largest);
    for (int c = t.lane; c < CLASSES; c += LANES) sum += expf(outputs[c] - largest);
    sum = warp_sum(sum);
    for (int c = t.lane; c < CLASSES; c += LANES) {
      const float slope = (expf(outputs[c] - largest) / sum - (c == label ? 1.f : 0.f)) * scale;
      const bool dead = s >= n || (Out::RECTIFIED && outputs[c] <= 0.f);
      memory[slope_at<Out>(s, c, 0)] = dead ? 0.f : slope;
    }
    if (s < n && t.lane == 0) {
      const float loss = logf(sum) + largest - outputs[label];
      if (!(loss - loss == 0.f)) *bad = 1;
      total += loss * scale;
    }
  }
}

template <class Out> DEVICE void cross_entropy_value(const Thread& t, const int* labels, int n, double& total, int& wrong) {
  for (int s = t.warp; s < n; s += WARPS) {
    const float* outputs = memory + Out::START + s * Out::SAMPLE;
    const int label = labels[s];
    float largest = outputs[0], sum = 0.f, before = 0.f;
    for (int c = t.lane; c < CLASSES; c += LANES) {
      largest = outputs[c] > largest ? outputs[c] : largest;
      before += outputs[c] > outputs[label] || (outputs[c] == outputs[label] && c < label) ? 1.f : 0.f;
    }
    largest = warp_max(largest), before = warp_sum(before);
    for (int c = t.lane; c < CLASSES; c += LANES) sum += expf(outputs[c] - largest);
    total += logf(warp_sum(sum)) + largest - outputs[label];
    wrong += before > 0.f;
  }
}

// GENERATED: struct Net, the passes over one group of samples

// A part of the steps of an epoch, or of an evaluation, in which a step is one group.
DEVICE void run_slice(const Thread& t, const Job& job, int block, int network, int slice) {
  float* weights = job.weights + (long long)network * WEIGHTS;
  float* velocity = job.velocity ? job.velocity + (long long)network * WEIGHTS : nullptr;
  float* gradients = job.gradients + (long long)block * WEIGHTS;
  const Settings by{job.rate[network], job.momentum[network], job.decay[network]};
  const int* order = job.order + (long long)network * job.order_step;
  const int* labels = job.labels + (long long)network * job.label_step;
  // No trace of another network: what is not a number there would stay so times zero.
  for (int i = t.id; i < SHARED_FLOATS; i += THREADS) memory[i] = 0.f;
  barrier();
  Net::set_ones(t);
  Net::fetch(t, weights);
  barrier();
  double total = 0.;
  int wrong = 0;
  const int batch = job.evaluates ? GROUP : job.batch[network], steps = (job.samples + batch - 1) / batch;
  const int end = (int)((long long)steps * (slice + 1) / job.slices);
  ONCE for (int step = (int)((long long)steps * slice / job.slices); step < end; step++) {
    const int start = step * batch, size = job.samples - start < batch ? job.samples - start : batch;
    ONCE for (int at = 0; at < size; at += GROUP) {
      const int n = size - at < GROUP ? size - at : GROUP;
      const int* chosen = labels + start + at;
      Net::forward(t, job.images, order + start + at, weights, n);
      if (job.evaluates) cross_entropy_value<Net::Outputs>(t, chosen, n, total, wrong);
      else cross_entropy_slopes<Net::Outputs>(t, chosen, n, 1.f / size, total, job.bad + network);
      barrier();
      if (!job.evaluates) Net::backward(t, by, weights, velocity, gradients, n, at == 0, at + n == size);
    }
  }
  barrier();
  if (!job.evaluates) Net::put_back(t, weights);
  if (t.lane == 0) {
    const long long place = ((long long)network * job.slices + slice) * WARPS + t.warp;
    job.losses[place] = total;
    if (job.evaluates) job.wrong[place] = wrong;
  }
}

#ifdef __CUDACC_RTC__
// Blocks take slices of networks from one queue. A slice waits for the one before it of its network, which a block
// that is running took earlier: so nobody waits for ever, however few blocks run at a time.
extern "C" __global__ void __launch_bounds__(THREADS, 1) fused(const Job job) {
  volatile int* taken = reinterpret_cast<int*>(memory);  // the first floats are nobody's
  const int id = threadIdx.x;
  const Thread t{id, id % LANES, id / LANES};
  for (;;) {
    barrier();
    if (id == 0) *taken = atomicAdd(job.queue, 1);
    barrier();
    const int item = *taken;
    if (item >= job.networks * job.slices) return;
    const int network = job.turn[item % job.networks], slice = item / job.networks;
    if (!job.evaluates) {
      if (id == 0)
        while (*(volatile int*)(job.finished + network) < slice) __nanosleep(500);
      __threadfence();  // and other blocks' changes of the weights are seen
    }
    barrier();
    __threadfence();
    run_slice(t, job, blockIdx.x, network, slice);
    __threadfence();
    barrier();
    if (id == 0 && !job.evaluates) *(volatile int*)(job.finished + network) = slice + 1;
  }
}
#else
extern "C" void fused(const Job* job) {
  std::vector<std::thread> threads;
  all_threads = std::make_unique<std::barrier<>>(THREADS);
  warps.clear();
  for (int warp = 0; warp < WARPS; warp++) warps.push_back(std::make_unique<std::barrier<>>(LANES));
  for (int id = 0; id < THREADS; id++)
    threads.emplace_back([=] {
      own_thread = id;
      const Thread t{id, id % LANES, id / LANES};
      for (int item = 0; item < job->networks * job->slices; item++) {
        barrier();
        run_slice(t, *job, 0, job->turn[item % job->networks], item / job->networks);
      }
    });
  for (auto& thread : threads) thread.join();
}
#endif
