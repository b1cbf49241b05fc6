// How long each rank has waited for others, and the bytes that this one has exchanged.
#ifndef TFSCALE_COMM_TRAFFIC_H_
#define TFSCALE_COMM_TRAFFIC_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "comm/mutex.h"
#include "comm/task.h"

namespace tfscale {

// A rank waits while a collective is active in which another rank has sent it nothing
// yet. So of the ranks of a step the last one waits least. Each rank counts its own time, and
// sends it to rank 0 in a notice of its own, once in `report_s` seconds: no collective. The
// communication thread counts; Read is for any thread.
class Traffic {
 public:
  // `report_s` is infinite or 0: nothing is counted.
  explicit Traffic(double report_s) : report_s_(report_s), is_on_(report_s > 0 && report_s < 1e8) {}

  bool is_on() const { return is_on_; }
  // Before the first count.
  void SetRanks(int rank, int size) {
    Lock lock(mutex_);
    rank_ = static_cast<size_t>(rank);
    waited_s_.assign(static_cast<size_t>(size), 0.0);
  }

  // Called often; `is_waiting` says whether this rank waits from now on.
  void Note(Clock::time_point now, bool is_waiting) {
    if (is_waiting_ && now > last_) {
      // A longer gap means that this process was stopped, or that its core computes: then it is
      // late itself.
      const Clock::duration gap = std::min<Clock::duration>(now - last_, kLongestGap);
      Lock lock(mutex_);
      waited_s_[rank_] += std::chrono::duration<double>(gap).count();
    }
    last_ = now;
    is_waiting_ = is_waiting;
  }
  void AddBytes(size_t bytes) {
    Lock lock(mutex_);
    bytes_ += static_cast<int64_t>(bytes);
  }

  // Returns what to report to rank 0, "" while nothing is due.
  std::string TakeReport(Clock::time_point now) {
    if (now < next_report_) return "";
    Lock lock(mutex_);
    const double waited_s = waited_s_[rank_];
    if (rank_ == 0 || waited_s == reported_s_) return "";
    next_report_ =
        now + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(report_s_));
    reported_s_ = waited_s;
    return std::to_string(waited_s);
  }
  // Takes the report of another rank.
  void Hear(int sender, const std::string& report) {
    Lock lock(mutex_);
    waited_s_.at(static_cast<size_t>(sender)) = std::strtod(report.c_str(), nullptr);
  }

  // Copies the seconds of up to `capacity` ranks, as far as this rank knows them; returns bytes.
  int64_t Read(double* waited_s, size_t capacity) const {
    Lock lock(mutex_);
    std::copy_n(waited_s_.begin(), std::min(capacity, waited_s_.size()), waited_s);
    return bytes_;
  }

 private:
  // More than any sleep of a communication thread that waits.
  static constexpr std::chrono::milliseconds kLongestGap{20};

  const double report_s_;
  const bool is_on_;
  // Of the communication thread:
  Clock::time_point last_{};
  bool is_waiting_ = false;
  Clock::time_point next_report_{};
  double reported_s_ = 0.0;

  mutable Mutex mutex_;
  size_t rank_ TFSCALE_GUARDED_BY(mutex_) = 0;
  std::vector<double> waited_s_ TFSCALE_GUARDED_BY(mutex_);  // by rank of the world
  int64_t bytes_ TFSCALE_GUARDED_BY(mutex_) = 0;
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_TRAFFIC_H_
