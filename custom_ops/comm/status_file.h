// File with the last state of a rank, read by its launcher after its death.
#ifndef TFSCALE_COMM_STATUS_FILE_H_
#define TFSCALE_COMM_STATUS_FILE_H_

#include <cstddef>
#include <string>

namespace tfscale {

// Owns a mapping of the file that tfscale/comm/process.py describes; the
// contents survive any end of this process. Used by the communication thread
// only; writing is a copy in memory. Without a file, or where it cannot be
// opened, nothing is done: a job must not fail because of its report.
class StatusFile {
 public:
  // `path` may be null or empty.
  explicit StatusFile(const char* path);
  ~StatusFile();
  StatusFile(const StatusFile&) = delete;
  StatusFile& operator=(const StatusFile&) = delete;

  bool is_open() const { return map_ != nullptr; }
  // Replaces the place; a text that is too long is cut.
  void WritePlace(const std::string& text) { Write(kStateBytes, kPlaceBytes, text); }
  // Writes why a collective failed; the first text stays.
  void WriteFailed(const std::string& text);

 private:
  // As in tfscale/comm/process.py.
  static constexpr size_t kStateBytes = 64;
  static constexpr size_t kPlaceBytes = 448;
  static constexpr size_t kFailedBytes = 512;
  static constexpr size_t kBytes = kStateBytes + kPlaceBytes + kFailedBytes;

  void Write(size_t offset, size_t bytes, const std::string& text);

  char* map_ = nullptr;
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_STATUS_FILE_H_
