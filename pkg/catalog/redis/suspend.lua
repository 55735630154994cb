-- Stops all commits but those of a repair, and takes the sequence above the witness.
local P, coordinator, by, inc, seq, digest = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6]
local call, key = redis.call, ARGV[1] .. 'suspended'
local leader = call('HGET', P .. 'leader', 'e') or '0'
if leader ~= coordinator or leader == '0' then return { 0, leader } end
local here = tonumber(call('GET', P .. 'seq') or '0')
local has = call('HMGET', key, 't', 's')
if not has[1] then
  local clock = call('TIME')
  local now = string.format('%.0f', tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000))
  call('HSET', key, 't', now, 'b', by, 'i', inc, 's', string.format('%.0f', seq), 'd', digest,
    'r', string.format('%.0f', here))
elseif tonumber(has[2]) < seq then
  call('HSET', key, 'i', inc, 's', string.format('%.0f', seq), 'd', digest)
end
-- What an incarnation was seen to have reached is lost or repaired by the end of this, never found missing again.
local known = tonumber(call('HGET', P .. 'lost', inc) or '0')
if inc ~= '' and seq > known then call('HSET', P .. 'lost', inc, string.format('%.0f', seq)) end
if here <= seq then
  local next = string.format('%.0f', seq + 1)
  local chain = redis.sha1hex((call('GET', P .. 'digest') or '') .. '\n' .. next .. '\nsuspended')
  call('SET', P .. 'seq', next)
  call('SET', P .. 'digest', chain)
  call('XADD', P .. 'log', next .. '-0', 'e', coordinator, 'i', '', 'h', chain)
end
return { 1, coordinator }
