// Check mode counts the rounds of every loop: two lanes are at the same place only if they are in the same round.
// Without it a lane that skipped a simd_sum by `continue` would be matched with the next round of the others.
#pragma once
namespace msl {
class loop_rounds {
 public:
  MSL_FN loop_rounds() : path_(msl_loop_path()), outer_(*path_) {}
  MSL_FN ~loop_rounds() { *path_ = outer_; }
  MSL_FN bool next() {
    rounds_++;
    path_->identity = (outer_.identity + rounds_) * 0x9E3779B97F4A7C15ull;
    path_->order = outer_.order * 65536 + rounds_;
    return true;
  }

 private:
  msl_path* path_;
  msl_path outer_;
  uint64_t rounds_ = 0;
};
}  // namespace msl
// Written by the rewriter around `for`, `while` and `do`; the empty first branch keeps an outer `else` where it was.
#define MSL_LOOP                            \
  if (msl::loop_rounds msl_rounds; false) { \
  } else
#define MSL_ROUND           \
  if (!msl_rounds.next()) { \
  } else
