#include "comm/pending.h"

#include <algorithm>
#include <utility>

namespace tfscale {

PendingVariables& PendingVariables::Get() {
  // Never destroyed: variables may be deleted after main.
  static auto* pending = new PendingVariables();
  return *pending;
}

void PendingVariables::Begin(const std::vector<Key>& keys) {
  Lock lock(mutex_);
  for (Key key : keys) {
    if (entries_[key].n_under_way++ == 0) ++n_pending_;
  }
  CountEntries();
}

void PendingVariables::End(const std::vector<Key>& keys, const Status& status,
                           std::vector<std::shared_ptr<void>> anchors) {
  anchors.resize(keys.size());
  std::vector<std::shared_ptr<Waiting>> ready;
  {
    Lock lock(mutex_);
    for (size_t i = 0; i < keys.size(); ++i) EndOne(keys[i], status, &anchors[i], &ready);
    CountEntries();
  }
  all_ended_.notify_all();
  for (const auto& waiting : ready) waiting->waiter(waiting->status);
}

// What is no longer needed of `anchor` is left in it: destroying it may call back.
void PendingVariables::EndOne(Key key, const Status& status, std::shared_ptr<void>* anchor,
                              std::vector<std::shared_ptr<Waiting>>* ready) {
  Entry& entry = entries_.at(key);
  entry.failure = status;
  entry.anchor.swap(*anchor);
  if (--entry.n_under_way > 0) return;
  --n_pending_;
  for (auto& waiting : entry.waiting) {
    if (waiting->status.ok()) waiting->status = status;
    if (--waiting->n_left == 0) ready->push_back(std::move(waiting));
  }
  entry.waiting.clear();
  if (!status.ok()) return;
  entries_.erase(key);
}

void PendingVariables::Await(const std::vector<Key>& keys, Waiter waiter) {
  auto waiting = std::make_shared<Waiting>();
  waiting->waiter = std::move(waiter);
  if (!is_empty()) {
    Lock lock(mutex_);
    for (Key key : keys) {
      const auto it = entries_.find(key);
      if (it == entries_.end()) continue;
      if (it->second.n_under_way > 0) {
        ++waiting->n_left;
        it->second.waiting.push_back(waiting);
      } else if (waiting->status.ok()) {
        waiting->status = it->second.failure;
      }
    }
    if (waiting->n_left > 0) return;
  }
  waiting->waiter(waiting->status);
}

void PendingVariables::Forget(Key key) {
  Entry forgotten;  // destroyed without the lock
  Lock lock(mutex_);
  const auto it = entries_.find(key);
  if (it == entries_.end() || it->second.n_under_way > 0) return;
  forgotten = std::move(it->second);
  entries_.erase(it);
  CountEntries();
}

int64_t PendingVariables::n_pending() {
  Lock lock(mutex_);
  return n_pending_;
}

bool PendingVariables::is_awaited() {
  Lock lock(mutex_);
  if (n_blocked_ > 0) return true;
  return std::any_of(entries_.begin(), entries_.end(),
                     [](const auto& entry) { return !entry.second.waiting.empty(); });
}

int64_t PendingVariables::n_failed() {
  Lock lock(mutex_);
  return static_cast<int64_t>(entries_.size()) - n_pending_;
}

void PendingVariables::WaitForAll() {
  Lock lock(mutex_);
  ++n_blocked_;
  while (n_pending_ > 0) lock.Wait(all_ended_);
  --n_blocked_;
}

}  // namespace tfscale
