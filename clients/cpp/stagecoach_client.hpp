// A client of Stagecoach's gateway: one header, for C++17 and POSIX sockets, without another library.
//
//     stagecoach::Session session({"ws://127.0.0.1:7700/v1/play", token, "arm"});
//     auto action = session.reset(observation);  // a std::vector<double>, or a Json for other spaces
//     while (action) {
//         world.advance(action->numbers());
//         action = session.step(world.reward(), world.observation(), world.terminated(), world.truncated());
//     }  // there is no action once the episode has ended
//
// A session keeps a journal of what the gateway has not acknowledged, in memory or in a file, and sends it again after
// a cut: nothing is learned twice, and nothing is lost with the connection or the gateway.

#ifndef STAGECOACH_CLIENT_HPP
#define STAGECOACH_CLIENT_HPP

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <fstream>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

namespace stagecoach {

// The gateway does not take what the client has sent, or does not know its token: sending it again does not help.
// After "full", call `reset` again later. The protocol lists the codes; a 401 is "unauthorized".
struct Refused : std::runtime_error {
    Refused(const std::string& why, const std::string& message) : std::runtime_error(why + ": " + message), code(why) {}
    std::string code;
};

// No answer came for `patience_seconds`. The journal still has what the gateway lacks; continue with `reset`.
struct Away : std::runtime_error {
    using std::runtime_error::runtime_error;
};

namespace detail {

inline constexpr std::size_t kLongestMessage = 1 << 24, kLongestHead = 1 << 16;
inline constexpr int kDeepest = 64, kMostAtOnce = 1000;
inline constexpr double kConnectSeconds = 10, kSilentSeconds = 30, kByeSeconds = 2;
inline constexpr std::int64_t kMostMessages = std::int64_t(1) << 53;
inline constexpr double kShortestPause = 0.05, kLongestPause = 5;

inline bool is_utf8(std::string_view text) {
    static constexpr std::uint32_t least[] = {0, 0x80, 0x800, 0x10000};
    for (std::size_t at = 0; at < text.size();) {
        const auto lead = static_cast<unsigned char>(text[at++]);
        const int more = lead < 0x80 ? 0 : lead >> 5 == 6 ? 1 : lead >> 4 == 14 ? 2 : lead >> 3 == 30 ? 3 : -1;
        if (more < 0 || text.size() - at < static_cast<std::size_t>(more)) return false;
        std::uint32_t code = more == 0 ? lead : lead & (0x3Fu >> more);
        for (int k = 0; k < more; ++k) {
            const auto next = static_cast<unsigned char>(text[at++]);
            if (next >> 6 != 2) return false;
            code = code << 6 | (next & 0x3Fu);
        }
        if (code < least[more] || code > 0x10FFFF || code >> 11 == 0x1B) return false;
    }
    return true;
}

template <class T>
bool read_number(std::string_view text, T& number) {
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, number);
    return error == std::errc() && stop == end;
}

// Goes through JSON text, and throws std::invalid_argument where it is none.
struct Scanner {
    std::string_view text;
    std::size_t at = 0;

    [[noreturn]] void fail() const { throw std::invalid_argument("wrong JSON at byte " + std::to_string(at)); }
    char next() { return at < text.size() ? text[at++] : (fail(), '\0'); }
    char peek() {
        at = std::min(text.find_first_not_of(" \t\r\n", at), text.size());
        return at < text.size() ? text[at] : '\0';
    }
    bool take(char expected) {
        const bool there = at < text.size() && peek() == expected && at < text.size();
        at += there;
        return there;
    }
    void expect(char expected) {
        if (!take(expected)) fail();
    }
    template <class Each>
    void list(char first, char last, Each each) {
        expect(first);
        if (take(last)) return;
        do each();
        while (take(','));
        expect(last);
    }
    // Returns the next value's text.
    std::string_view value(int depth = 0) {
        const char first = peek();
        const std::size_t begin = at;
        if (depth > kDeepest) fail();
        if (first == '{') list('{', '}', [&] { string(), expect(':'), value(depth + 1); });
        else if (first == '[') list('[', ']', [&] { value(depth + 1); });
        else if (first == '"') string();
        else {
            at = std::min(text.find_first_of(" \t\r\n,:]}", at), text.size());
            const std::string_view word = text.substr(begin, at - begin);
            double number = 0;
            const bool numeric = word.find_first_not_of("+-.0123456789eE") == word.npos && read_number(word, number);
            if (!numeric && word != "true" && word != "false" && word != "null") fail();
        }
        return text.substr(begin, at - begin);
    }
    std::uint32_t unit() {
        std::uint32_t code = 0;
        for (int k = 0; k < 4; ++k) {
            const std::size_t digit = std::string_view("0123456789abcdefABCDEF").find(next());
            if (digit == std::string_view::npos) fail();
            code = code << 4 | static_cast<std::uint32_t>(digit < 16 ? digit : digit - 6);
        }
        return code;
    }
    void escaped(std::string& out) {
        static constexpr std::string_view letters = "\"\\/bfnrt", meanings = "\"\\/\b\f\n\r\t";
        const char letter = next();
        if (const auto index = letters.find(letter); index != letters.npos) return void(out += meanings[index]);
        if (letter != 'u') fail();
        std::uint32_t code = unit();
        if (code >> 10 == 0x36 && text.substr(at, 2) == "\\u") {  // the first half of a pair
            at += 2;
            const std::uint32_t low = unit();
            code = low >> 10 == 0x37 ? 0x10000 + ((code & 0x3FF) << 10 | (low & 0x3FF)) : 0xFFFD;
        }
        if (code >> 11 == 0x1B) code = 0xFFFD;  // half of a pair
        const int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
        static constexpr std::uint32_t leads[] = {0, 0xC0, 0xE0, 0xF0};
        out += static_cast<char>(leads[more] | code >> (6 * more));
        for (int k = more - 1; k >= 0; --k) out += static_cast<char>(0x80 | (code >> (6 * k) & 0x3F));
    }
    std::string string() {
        std::string out;
        expect('"');
        for (char letter; (letter = next()) != '"';) {
            if (letter == '\\') escaped(out);
            else if (static_cast<unsigned char>(letter) < 0x20) fail();
            else out += letter;
        }
        return out;
    }
};

}  // namespace detail

// A JSON value, kept as its text. Wrong types, missing fields, bad text and NaN throw std::invalid_argument.
class Json {
public:
    using Object = std::vector<std::pair<std::string, Json>>;

    Json(std::nullptr_t = nullptr) : text_("null") {}
    Json(const char* value) : Json(std::string(value)) {}
    Json(const std::string& value) : text_("\"") {
        if (!detail::is_utf8(value)) throw std::invalid_argument("a string that is not UTF-8");
        for (const char each : value) {
            if (each == '"' || each == '\\') text_.append({'\\', each});
            else if (static_cast<unsigned char>(each) >= 0x20) text_ += each;
            else text_.append({'\\', 'u', '0', '0', each < 0x10 ? '0' : '1', "0123456789abcdef"[each & 0xF]});
        }
        text_ += '"';
    }
    template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
    Json(T value) {
        if constexpr (std::is_same_v<T, bool>) {  // no pointer becomes a bool here
            text_ = value ? "true" : "false";
        } else if constexpr (std::is_integral_v<T>) {
            text_ = std::to_string(value);
        } else {
            if (!std::isfinite(value)) throw std::invalid_argument("NaN or infinity cannot be learned from");
            std::array<char, 32> digits;  // the shortest text that is read as the same number
            text_.assign(digits.data(), std::to_chars(digits.begin(), digits.end(), static_cast<double>(value)).ptr);
            if (text_.find_first_of(".e") == text_.npos) text_ += ".0";
        }
    }
    template <class T>
    Json(const std::vector<T>& values) : text_("[") {
        for (const auto& value : values) text_.append(text_.size() > 1 ? "," : "").append(Json(value).text_);
        text_ += ']';
    }
    Json(const Object& fields) : text_("{") {
        for (const auto& [name, value] : fields)
            text_.append(text_.size() > 1 ? "," : "").append(Json(name).text_).append(":").append(value.text_);
        text_ += '}';
    }

    static Json parse(std::string_view text) {
        detail::Scanner scanner{text};
        Json found;
        found.text_ = scanner.value();
        scanner.peek();
        if (scanner.at != text.size() || !detail::is_utf8(text)) scanner.fail();
        return found;
    }
    const std::string& dump() const { return text_; }

    bool is_null() const { return text_ == "null"; }
    std::string string() const { return detail::Scanner{text_}.string(); }
    template <class T = double>
    T number() const {
        T found = 0;
        if (!detail::read_number(text_, found)) throw std::invalid_argument("expected a number, got " + text_);
        return found;
    }
    // All numbers of nested arrays, row by row; `numbers<int>()` for whole ones.
    template <class T = double>
    std::vector<T> numbers() const {
        if (text_[0] != '[') return {number<T>()};
        std::vector<T> found;
        for (const Json& item : items())
            for (const T number : item.numbers<T>()) found.push_back(number);
        return found;
    }
    std::vector<Json> items() const {
        std::vector<Json> found;
        detail::Scanner scanner{text_};
        scanner.list('[', ']', [&] { found.emplace_back().text_ = scanner.value(); });
        return found;
    }
    Object fields() const {
        Object found;
        detail::Scanner scanner{text_};
        scanner.list('{', '}', [&] {
            Json& value = found.emplace_back(scanner.string(), nullptr).second;
            scanner.expect(':');
            value.text_ = scanner.value();
        });
        return found;
    }
    std::optional<Json> find(std::string_view name) const {
        for (const auto& [own, value] : fields())
            if (own == name) return value;
        return std::nullopt;
    }
    Json operator[](std::string_view name) const {
        if (auto found = find(name)) return *found;
        throw std::invalid_argument("no field " + std::string(name) + " in JSON");
    }

private:
    std::string text_;
};

namespace detail {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

// The connection has ended, or what came through it makes no sense; another one may do.
struct Cut : std::runtime_error {
    using std::runtime_error::runtime_error;
    explicit Cut(int error) : std::runtime_error(std::system_category().message(error)) {}
};

inline std::chrono::nanoseconds span(double seconds) {
    return std::chrono::nanoseconds(seconds > 0 ? static_cast<std::int64_t>(std::min(seconds, 1e9) * 1e9) : 0);
}
inline Time after(double seconds) { return Clock::now() + span(seconds); }

inline std::string base64(std::string_view bytes) {
    static constexpr char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string out;
    for (std::size_t at = 0; at < bytes.size(); at += 3) {
        std::uint32_t three = 0;
        for (std::size_t k = at; k < at + 3; ++k)
            three = three << 8 | (k < bytes.size() ? static_cast<unsigned char>(bytes[k]) : 0u);
        for (std::size_t k = 0; k < 4; ++k) out += at + k > bytes.size() ? '=' : digits[three >> (18 - 6 * k) & 0x3F];
    }
    return out;
}

// Needed by the WebSocket handshake alone.
inline std::string sha1(std::string text) {
    const auto rotated = [](std::uint32_t word, int by) { return word << by | word >> (32 - by); };
    std::array<std::uint32_t, 5> state = {0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476, 0xC3D2E1F0};
    const std::uint64_t bits = text.size() * 8;
    text += '\x80';
    text.append((120 - text.size() % 64) % 64, '\0');
    for (int shift = 56; shift >= 0; shift -= 8) text += static_cast<char>(bits >> shift & 0xFF);
    for (std::size_t block = 0; block < text.size(); block += 64) {
        std::array<std::uint32_t, 80> words{};
        for (std::size_t k = 0; k < 64; ++k)
            words[k / 4] = words[k / 4] << 8 | static_cast<unsigned char>(text[block + k]);
        for (std::size_t k = 16; k < 80; ++k)
            words[k] = rotated(words[k - 3] ^ words[k - 8] ^ words[k - 14] ^ words[k - 16], 1);
        auto [a, b, c, d, e] = state;
        for (std::size_t k = 0; k < 80; ++k) {
            const std::uint32_t mixed = k < 20   ? ((b & c) | (~b & d)) + 0x5A827999
                                        : k < 40 ? (b ^ c ^ d) + 0x6ED9EBA1
                                        : k < 60 ? ((b & c) | (b & d) | (c & d)) + 0x8F1BBCDC
                                                 : (b ^ c ^ d) + 0xCA62C1D6;
            const std::uint32_t first = rotated(a, 5) + mixed + e + words[k];
            e = d, d = c, c = rotated(b, 30), b = a, a = first;
        }
        state = {state[0] + a, state[1] + b, state[2] + c, state[3] + d, state[4] + e};
    }
    std::string digest;
    for (const std::uint32_t word : state)
        for (int shift = 24; shift >= 0; shift -= 8) digest += static_cast<char>(word >> shift & 0xFF);
    return digest;
}

inline std::string random_bytes(std::size_t count) {
    std::random_device random;
    std::string bytes;
    while (bytes.size() < count) bytes += static_cast<char>(random() & 0xFF);
    return bytes;
}

struct File {
    explicit File(int opened = -1) : number(opened) {}
    File(File&& other) noexcept : number(std::exchange(other.number, -1)) {}
    File& operator=(File&& other) noexcept { return std::swap(number, other.number), *this; }
    ~File() {
        if (number >= 0) ::close(number);
    }
    int number;
};

struct Address {
    std::string authority, host, port = "80", path;

    explicit Address(const std::string& url) {
        const auto odd = [](char each) { return each <= ' ' || each > '~'; };
        if (url.rfind("ws://", 0) != 0 || std::any_of(url.begin(), url.end(), odd))
            throw std::invalid_argument("expected an address such as ws://127.0.0.1:7700/v1/play, got " + url +
                                        (url.rfind("wss", 0) == 0 ? "; for TLS use a proxy, such as stunnel" : ""));
        const std::size_t slash = std::min(url.find('/', 5), url.size());
        authority = host = url.substr(5, slash - 5);
        path = slash < url.size() ? url.substr(slash) : "/";
        if (const std::size_t colon = host.rfind(':'); colon != std::string::npos && host.back() != ']') {
            port = host.substr(colon + 1);
            host.resize(colon);
        }
        if (host.size() > 1 && host.front() == '[') host = host.substr(1, host.size() - 2);
    }
};

// A WebSocket whose waits all have an end. Throws Cut when it is over.
class Connection {
public:
    Connection(const Address& address, const std::string& token, Time until) {
        open(address, until);
        const std::string key = base64(random_bytes(16));
        write("GET " + address.path + " HTTP/1.1\r\nHost: " + address.authority + "\r\nUpgrade: websocket\r\n" +
              "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + key +
              "\r\nAuthorization: Bearer " + token + "\r\n\r\n");
        std::size_t end = 0;
        while ((end = buffer_.find("\r\n\r\n")) == std::string::npos)
            if (!fill(until) || Clock::now() > until || buffer_.size() > kLongestHead) throw Cut("no answer");
        const std::string head = buffer_.substr(0, end + 2);
        buffer_.erase(0, end + 4);
        const std::string status = head.substr(0, head.find('\r'));
        if (status.rfind(" 401", 8) != status.npos) throw Refused("unauthorized", "the token is unknown");
        const std::string proof = base64(sha1(key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"));
        if (status.rfind(" 101", 8) == status.npos || head.find(proof) == head.npos) throw Cut("got " + status);
    }

    void send(std::string_view text) { frame(1, text); }

    // Returns the next text message; none if it has not come until then.
    std::optional<std::string> receive(Time until) {
        for (bool late = false; true; late = Clock::now() >= until) {
            while (const auto kind = next_frame()) {
                if (*kind == 8) throw Cut("the gateway has closed the connection");
                if (*kind == 9) frame(10, payload_);
                if (*kind == 1 && !is_utf8(message_)) throw Cut("a message is not UTF-8");
                if (*kind == 1) return std::move(message_);
            }
            const Time silent = after(kSilentSeconds);
            if (late || (!fill(std::min(until, silent)) && until <= silent)) return std::nullopt;
            if (Clock::now() >= silent) throw Cut("the gateway is silent");
        }
    }

private:
    // Takes a frame out of the buffer, if one is complete; returns its kind, 0 for a part of a message.
    std::optional<int> next_frame() {
        const auto byte = [this](std::size_t at) { return static_cast<unsigned char>(buffer_[at]); };
        if (buffer_.size() < 2) return std::nullopt;
        const int kind = byte(0) & 0xF;
        const bool last = (byte(0) & 0x80) != 0, control = kind >= 8;
        std::uint64_t length = byte(1) & 0x7F;
        const std::size_t head = length == 126 ? 4 : length == 127 ? 10 : 2;
        if ((byte(0) & 0x70) != 0 || (byte(1) & 0x80) != 0 || (kind > 2 && kind < 8) || kind > 10 ||
            (control && (length > 125 || !last)) || (!control && (kind == 0) != (open_kind_ != 0)))
            throw Cut("a frame that WebSockets do not have");
        if (buffer_.size() < head) return std::nullopt;
        if (head > 2) length = 0;
        for (std::size_t at = 2; at < head; ++at) length = length << 8 | byte(at);
        if (length > kLongestMessage || parts_.size() + length > kLongestMessage) throw Cut("a message is too long");
        if (buffer_.size() - head < length) return std::nullopt;
        payload_.assign(buffer_, head, static_cast<std::size_t>(length));
        buffer_.erase(0, head + static_cast<std::size_t>(length));
        if (control) return kind;
        if (kind != 0) open_kind_ = kind;
        parts_ += payload_;
        if (!last) return 0;
        message_ = std::exchange(parts_, {});
        return std::exchange(open_kind_, 0);
    }

    void frame(int kind, std::string_view payload) {
        const std::uint64_t size = payload.size();
        const int bytes = size < 126 ? 0 : size < 65536 ? 2 : 8;
        const std::uint64_t first = bytes == 0 ? size : bytes == 2 ? 126 : 127;
        std::string out{static_cast<char>(0x80 | kind), static_cast<char>(0x80 | first)};
        for (int k = bytes - 1; k >= 0; --k) out += static_cast<char>(size >> (8 * k) & 0xFF);
        const std::string mask = random_bytes(4);
        out += mask;
        for (std::size_t at = 0; at < size; ++at) out += static_cast<char>(payload[at] ^ mask[at % 4]);
        write(out);
    }

    void open(const Address& address, Time until) {
        addrinfo hints{}, *found = nullptr;
        hints.ai_socktype = SOCK_STREAM;
        if (const int error = ::getaddrinfo(address.host.c_str(), address.port.c_str(), &hints, &found))
            throw Cut(::gai_strerror(error));
        const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(found, ::freeaddrinfo);
        int error = 0;
        for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
            socket_ = File(::socket(each->ai_family, SOCK_STREAM, 0));
            const int on = 1;
            if (socket_.number < 0) throw Cut(errno);
            ::fcntl(socket_.number, F_SETFD, FD_CLOEXEC);
            ::fcntl(socket_.number, F_SETFL, O_NONBLOCK);
            ::setsockopt(socket_.number, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
#ifdef SO_NOSIGPIPE
            ::setsockopt(socket_.number, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof on);
#endif
            error = ::connect(socket_.number, each->ai_addr, each->ai_addrlen) == 0 ? 0 : errno;
            socklen_t size = sizeof error;
            if (error == EINPROGRESS && !ready(POLLOUT, until)) error = ETIMEDOUT;
            else if (error == EINPROGRESS) ::getsockopt(socket_.number, SOL_SOCKET, SO_ERROR, &error, &size);
            if (error == 0) return;
        }
        throw Cut(error);
    }

    bool ready(short events, Time until) const {
        while (true) {
            const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
            pollfd waiting{socket_.number, events, 0};
            const int found = ::poll(&waiting, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, 60000)));
            if (found > 0) return true;
            if (found < 0 && errno != EINTR) throw Cut(errno);
            if (Clock::now() >= until) return false;
        }
    }

    // Reads what is there into the buffer; waits for it at most until then.
    bool fill(Time until) {
        std::array<char, 65536> piece;
        while (ready(POLLIN, until)) {
            const ssize_t count = ::recv(socket_.number, piece.data(), piece.size(), 0);
            if (count == 0) throw Cut("the connection has ended");
            if (count < 0 && errno != EAGAIN && errno != EINTR) throw Cut(errno);
            if (count > 0) return buffer_.append(piece.data(), static_cast<std::size_t>(count)), true;
        }
        return false;
    }

    void write(std::string_view bytes) {
#ifdef MSG_NOSIGNAL
        constexpr int flags = MSG_NOSIGNAL;
#else
        constexpr int flags = 0;
#endif
        while (!bytes.empty()) {
            const ssize_t count = ::send(socket_.number, bytes.data(), bytes.size(), flags);
            if (count >= 0) bytes.remove_prefix(static_cast<std::size_t>(count));
            else if (errno != EAGAIN && errno != EINTR) throw Cut(errno);
            else if (!ready(POLLOUT, after(kSilentSeconds))) throw Cut("the gateway does not read");
        }
    }

    File socket_;
    std::string buffer_, payload_, parts_, message_;
    int open_kind_ = 0;
};

// A message that is not acknowledged: its text without the last brace, with its answer once it has come.
struct Kept {
    std::int64_t seq;
    std::string text;
    bool answered = false;
};

// The journal's messages, without gaps, and their file, if there is one.
class Journal {
public:
    explicit Journal(std::string path) : path_(std::move(path)) {
        if (path_.empty()) return;
        std::ifstream file(path_);
        if (!file && ::access(path_.c_str(), F_OK) == 0) fail();
        try {
            for (std::string line; std::getline(file, line);) take(line);
        } catch (const std::invalid_argument&) {  // a line that a kill has cut
        }
        rewrite();
    }

    bool empty() const { return kept_.empty(); }
    std::size_t size() const { return kept_.size(); }
    std::int64_t first() const { return kept_.front().seq; }
    std::int64_t end() const { return kept_.back().seq + 1; }
    Kept* find(std::int64_t seq) {
        return empty() || seq < first() || seq >= end() ? nullptr : &kept_[static_cast<std::size_t>(seq - first())];
    }
    void add(std::int64_t seq, const Json& message) {
        append(message.dump() + "\n");
        kept_.push_back({seq, message.dump().substr(0, message.dump().size() - 1)});
    }
    void answer(std::int64_t seq, const Json& action, std::int64_t version) {
        Kept* message = find(seq);
        if (message == nullptr || message->answered) return;
        const std::string answer = ",\"action\":" + action.dump() + ",\"version\":" + std::to_string(version);
        append("{\"seq\":" + std::to_string(seq) + answer + "}\n");
        message->text += answer;
        message->answered = true;
    }
    void forget(std::int64_t before) {
        if (empty() || first() >= before) return;
        while (!empty() && first() < before) kept_.pop_front();
        rewrite();
    }

private:
    void take(const std::string& line) {
        const Json message = Json::parse(line);
        const auto seq = message["seq"].number<std::int64_t>();
        const auto version = message.find("version");
        if (!message.find("type")) return answer(seq, message["action"], version->number<std::int64_t>());
        if (seq < 0 || seq >= kMostMessages || (!empty() && seq != end())) throw std::invalid_argument("a gap");
        kept_.push_back({seq, line.substr(0, line.rfind('}')), version.has_value()});
    }
    [[noreturn]] void fail() const { throw std::system_error(errno, std::system_category(), "journal " + path_); }
    void append(std::string_view text) {
        const off_t before = file_.number < 0 ? 0 : ::lseek(file_.number, 0, SEEK_END);
        while (file_.number >= 0 && !text.empty()) {
            const ssize_t count = ::write(file_.number, text.data(), text.size());
            if (count < 0 && errno != EINTR) {
                const int error = errno;  // a part of a line would spoil the next one
                errno = ::ftruncate(file_.number, before) == 0 ? error : errno;
                fail();
            }
            if (count > 0) text.remove_prefix(static_cast<std::size_t>(count));
        }
    }
    void rewrite() {
        if (path_.empty()) return;
        const std::string part = path_ + ".part";
        file_ = File(::open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600));
        if (file_.number < 0) fail();
        for (const Kept& message : kept_) append(message.text + "}\n");
        if (std::rename(part.c_str(), path_.c_str()) != 0) fail();
    }

    std::string path_;
    File file_;
    std::deque<Kept> kept_;
};

}  // namespace detail

struct Options {
    std::string url;             // ws://HOST:PORT/v1/play; for TLS, that of a local proxy such as stunnel
    std::string token;
    std::string name = "0";      // 1 to 64 letters, digits, '.', '_' or '-'; unique among the client's environments
    std::string journal = {};    // a file, so that a program that was killed continues its session; none: in memory
    Json spaces = {};            // {"observation": …, "action": …}, compared with the run's
    double patience_seconds = 3600;  // `reset` and `step` throw Away without an answer for so long
};

// One environment's life. Methods block until the gateway has answered, through cuts and restarts of it. A session is
// for one thread; others may play in other threads.
class Session {
public:
    // Reads the journal, if there is one; connects with the first message.
    explicit Session(Options options)
        : options_(std::move(options)), address_(options_.url), journal_(options_.journal) {
        const auto odd = [](char each) { return each <= ' ' || each > '~'; };
        if (std::any_of(options_.token.begin(), options_.token.end(), odd))
            throw std::invalid_argument("the token has spaces, line breaks or letters beyond ASCII");
        if (!journal_.empty()) next_ = journal_.end();
    }

    // Begins an episode; returns its first action.
    std::optional<Json> reset(const Json& observation) {
        const detail::Time until = detail::after(options_.patience_seconds);
        attempt(until, [this] { return connection_ != nullptr; });  // the numbers continue where the gateway is
        return exchange({{"type", "reset"}, {"observation", observation}}, false, until);
    }

    // Sends what the last action led to; returns the next action, none at the end of an episode.
    std::optional<Json> step(double reward, const Json& observation, bool terminated = false, bool truncated = false,
                             const Json::Object& info = {}) {
        if (!acting_) throw std::logic_error("a step without an action before it: call reset");
        return exchange({{"type", "step"}, {"reward", reward}, {"observation", observation}, {"info", info},
                         {"terminated", terminated}, {"truncated", truncated}},
                        terminated || truncated, detail::after(options_.patience_seconds));
    }

    // Waits until all is acknowledged, or so long; returns how many messages the journal still has. A program that
    // computes for longer than 10 s between steps keeps its connection by calling `settle(0)` meanwhile.
    std::size_t settle(double seconds) {
        try {
            if (!journal_.empty()) attempt(detail::after(seconds), [this] { return journal_.empty(); });
        } catch (const Away&) {
        }
        return journal_.size();
    }

    // Says bye: the slot is free once all of the session is in the log. Without it the slot is kept for a while.
    void close() {
        const auto connection = std::move(connection_);
        acting_ = false;
        if (connection == nullptr) return;
        try {
            connection->send(R"({"type":"bye"})");
            const detail::Time until = detail::after(detail::kByeSeconds);
            while (connection->receive(until) && detail::Clock::now() < until) {
            }  // until the gateway closes: an earlier end could take the bye with it
        } catch (const detail::Cut&) {
        }
    }

    std::int64_t version() const { return version_; }  // of the policy that gave the last action
    const Json& spaces() const { return spaces_; }     // the run's, once the session has been connected

private:
    std::optional<Json> exchange(Json::Object message, bool ends, detail::Time until) {
        const std::int64_t seq = next_;
        message.emplace_back("seq", seq);
        journal_.add(seq, message);
        ++next_;
        acting_ = false;
        answer_.reset();
        attempt(until, [&] { return ends ? sent_ > seq : answer_.has_value(); });
        acting_ = !ends;
        return ends ? std::nullopt : answer_;
    }

    // Connects, sends what the gateway lacks and handles what it sends, until that is done; throws Away if it is late.
    template <class Done>
    void attempt(detail::Time until, Done done) {
        while (true) {
            try {
                if (connection_ == nullptr) connect(until);
                for (; sent_ < next_; ++sent_) {
                    if (const detail::Kept* kept = journal_.find(sent_)) connection_->send(kept->text + "}");
                    drain();
                }
                drain();
                if (done()) return;
                if (const auto text = connection_->receive(until)) handle(*text);
            } catch (const detail::Cut& cut) {
                connection_.reset();
                reason_ = cut.what();
                const double part = 1 + static_cast<double>(std::random_device()() % 1000) / 2000;
                const auto pause = detail::span(std::min(pause_ * part, detail::kLongestPause));
                std::this_thread::sleep_until(std::min(until, detail::Clock::now() + pause));
                pause_ = std::min(2 * pause_, detail::kLongestPause);
                if (pause_ >= detail::kLongestPause && !std::exchange(complained_, true))
                    std::fprintf(stderr, "the gateway at %s is away; trying again\n", options_.url.c_str());
            } catch (...) {
                connection_.reset();
                throw;
            }
            if (detail::Clock::now() >= until && !done()) throw Away(options_.url + ": no answer in time: " + reason_);
        }
    }

    void drain() {
        for (int most = detail::kMostAtOnce; most > 0; --most) {
            const auto text = connection_->receive(detail::Clock::now());
            if (!text) return;
            handle(*text);
        }
    }

    void connect(detail::Time until) {
        until = std::min(until, detail::after(detail::kConnectSeconds));
        auto opened = std::make_unique<detail::Connection>(address_, options_.token, until);
        Json from;
        if (!journal_.empty()) from = journal_.first();
        else if (joined_) from = next_;
        Json::Object hello = {{"type", "hello"}, {"protocol", 1}, {"session", options_.name}, {"journal_from", from}};
        if (!options_.spaces.is_null()) hello.emplace_back("spaces", options_.spaces);
        opened->send(Json(hello).dump());
        welcomed_ = false;
        while (!welcomed_) {
            const auto text = opened->receive(until);
            if (!text || detail::Clock::now() > until) throw detail::Cut("no welcome");
            handle(*text);
        }
        connection_ = std::move(opened);
    }

    void welcome(const Json& message) {
        const std::int64_t from = message["from"].number<std::int64_t>(), next = message["next"].number<std::int64_t>();
        if (from < 0 || from > next || next > detail::kMostMessages) throw std::invalid_argument("impossible numbers");
        if (joined_ && next > next_) throw Refused("session", "another program has played this session");
        spaces_ = message.find("spaces").value_or(nullptr);
        journal_.forget(next > next_ ? next : from);  // in the first case a part of the journal was lost
        next_ = std::max(next_, next);
        sent_ = journal_.empty() ? next_ : std::max(next, journal_.first());
        joined_ = welcomed_ = true;
    }

    void handle(const std::string& text) {
        try {
            const Json message = Json::parse(text);
            const std::string type = message["type"].string();
            if (type == "welcome") {
                welcome(message);
            } else if (type == "action") {
                const auto seq = message["seq"].number<std::int64_t>();
                const auto version = message["version"].number<std::int64_t>();
                journal_.answer(seq, message["action"], version);
                pause_ = detail::kShortestPause;
                if (seq != next_ - 1) return;
                answer_ = message["action"];
                version_ = version;
            } else if (type == "acknowledged") {
                const auto before = message["seq"].number<std::int64_t>();
                if (before > next_) throw std::invalid_argument("a number that was not sent");
                journal_.forget(before);
                pause_ = detail::kShortestPause;
            } else if (type == "goodbye") {
                throw detail::Cut("the gateway said goodbye");
            } else if (type == "error") {
                const std::string code = message["error"].string(), why = message["message"].string();
                if (code == "away" || code == "failed") throw detail::Cut(code + ": " + why);
                throw Refused(code, why);
            }
        } catch (const std::invalid_argument& error) {
            throw detail::Cut("the gateway sent " + text.substr(0, 80) + ": " + error.what());
        }
    }

    Options options_;
    detail::Address address_;
    detail::Journal journal_;
    std::unique_ptr<detail::Connection> connection_;
    std::int64_t next_ = 0;  // number of the next message
    std::int64_t sent_ = 0;  // the first message that this connection has not sent
    std::int64_t version_ = -1;
    bool joined_ = false, welcomed_ = false, acting_ = false;
    std::optional<Json> answer_;
    Json spaces_;
    std::string reason_ = "it has the message";
    double pause_ = detail::kShortestPause;
    bool complained_ = false;
};

}  // namespace stagecoach

#endif
